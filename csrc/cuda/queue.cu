#include "queue.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace torchrec_ext::cuda {
namespace {

Queue current_queue(int device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  int multiprocessors = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  STD_TORCH_CHECK(error == cudaSuccess, "device ", device, ": ", cudaGetErrorString(error));
  return {static_cast<cudaStream_t>(stream), multiprocessors};
}

}  // namespace

CurrentQueue::CurrentQueue(const torch::stable::Tensor& tensor)
    : guard_(tensor.get_device_index()), queue_(current_queue(tensor.get_device_index())) {}

}  // namespace torchrec_ext::cuda
