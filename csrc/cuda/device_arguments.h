#pragma once

#include <torch/csrc/stable/ops.h>

#include <deque>
#include <optional>
#include <type_traits>
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

// How many columns kernels read and write in one access: 1 for all tables of a call where one of them
// has a dim that is no multiple of 4, else 4.
int columns_at_once(const Layout& layout);

// Calls body with that number as an integral_constant.
template <class Body>
void dispatch_columns(int at_once, const Body& body) {
  if (at_once == 1) {
    return body(std::integral_constant<int, 1>{});
  }
  body(std::integral_constant<int, kColumnsPerLane>{});
}

// Dims, and where at_once is 4 that every row begins at a multiple of four elements.
void check_alignment(const Layout& layout, const std::vector<StateInfo>& infos, int at_once);

DeviceLayout read_device_layout(const std::optional<Tensor>& device_layout, const Layout& layout,
                                const Tensor& like);

template <class Weight>
Weights<Weight> read_weights(const TableArguments& arguments, const Layout& layout, int64_t lookups,
                             int at_once);

std::vector<Buffers<float>> read_states(const Layout& layout, const std::vector<StateInfo>& infos,
                                        const std::vector<Tensor>& states,
                                        const std::optional<std::vector<Tensor>>& managed_states,
                                        const Tensor& like, int at_once);

OutputType read_output_type(const char* name, const Tensor& output);

// The gradient, copied where it is not contiguous or not aligned.
Tensor readable_gradient(const Tensor& grad_output, const Tensor& like, int at_once);
GradientSource read_gradient(const Tensor& gradient, float max_gradient, int at_once);

Lookups take_lookups(Scratch& scratch, int64_t count, const Layout& layout, bool has_scales);

}  // namespace torchrec_ext::cuda
