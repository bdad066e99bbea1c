// In place of csrc/cuda/queue.cu: the "device" is the CPU.

#include "cuda/queue.h"

namespace torchrec_ext::cuda {

CurrentQueue::CurrentQueue(const torch::stable::Tensor&) : queue_{nullptr, 0} {
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  queue_.multiprocessors = multiprocessors;
}

}  // namespace torchrec_ext::cuda
