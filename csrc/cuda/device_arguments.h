#pragma once

#include <torch/csrc/stable/ops.h>

#include <deque>
#include <optional>
#include <vector>

#include "../arguments.h"
#include "gradient_sum.h"
#include "segments.h"

namespace torchrec_ext::cuda {

// Rows no wider than this fit into shared memory, where row sums keep the gradient.
inline constexpr int64_t kMaxDim = 2048;

// Device memory for one op: freed in stream order when the op returns.
class Scratch {
 public:
  explicit Scratch(const Tensor& like) : like_(like) {}

  template <class Value>
  Value* take(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(Value));
    tensors_.push_back(torch::stable::new_empty(like_, {bytes}, ScalarType::Byte));
    return static_cast<Value*>(tensors_.back().mutable_data_ptr());
  }

  // Numbers of rows: uint64 where wide, else uint32.
  void* take_keys(int64_t count, bool wide) {
    return wide ? static_cast<void*>(take<uint64_t>(count))
                : static_cast<void*>(take<uint32_t>(count));
  }

 private:
  const Tensor& like_;
  std::deque<Tensor> tensors_;
};

// What the ops here know of tables, beyond the layout that they share with the CPU.
struct TableArguments {
  const Tensor& weights;
  const std::optional<Tensor>& managed_weights;
  const std::optional<Tensor>& cache_weights;
  const std::optional<Tensor>& cache_locations;
};

// Kernels read and write four columns at a time: every row must begin at a multiple of four elements.
void check_alignment(const Layout& layout, const std::vector<StateInfo>& infos);

DeviceLayout read_device_layout(const std::optional<Tensor>& device_layout, const Layout& layout,
                                const Tensor& like);

template <class Weight>
Weights<Weight> read_weights(const TableArguments& arguments, const Layout& layout,
                             int64_t lookups);

std::vector<Buffers<float>> read_states(const Layout& layout, const std::vector<StateInfo>& infos,
                                        const std::vector<Tensor>& states,
                                        const std::optional<std::vector<Tensor>>& managed_states,
                                        const Tensor& like);

// The gradient, copied where it is not contiguous or not aligned.
Tensor readable_gradient(const Tensor& grad_output, const Tensor& like);
GradientSource read_gradient(const Tensor& gradient, float max_gradient);

Lookups take_lookups(Scratch& scratch, int64_t count, const Layout& layout, bool has_scales);

}  // namespace torchrec_ext::cuda
