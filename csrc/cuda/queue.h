#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "launch.h"

namespace torchrec_ext::cuda {

// Makes a tensor's device the current one as long as it lives; its queue is the current stream there.
class CurrentQueue {
 public:
  explicit CurrentQueue(const torch::stable::Tensor& tensor);

  const Queue& get() const { return queue_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  Queue queue_;
};

}  // namespace torchrec_ext::cuda
