#include "device_arguments.h"

#include <algorithm>
#include <limits>

namespace torchrec_ext::cuda {
namespace {

constexpr uintptr_t kAlignment = 16;

// Single elements are aligned wherever they lie.
bool is_aligned(const Tensor& tensor, int at_once) {
  return at_once == 1 || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
}

void check_aligned(const char* name, const Tensor& tensor, int at_once) {
  STD_TORCH_CHECK(is_aligned(tensor, at_once), name, " must begin at a multiple of ", kAlignment,
                  " bytes");
}

int64_t size_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->numel() : 0;
}

}  // namespace

int columns_at_once(const Layout& layout) {
  const bool multiples =
      std::all_of(layout.tables.begin(), layout.tables.end(),
                  [](const Table& table) { return table.dim % kColumnsPerLane == 0; });
  return multiples ? kColumnsPerLane : 1;
}

void check_alignment(const Layout& layout, const std::vector<StateInfo>& infos, int at_once) {
  for (size_t t = 0; t < layout.tables.size(); ++t) {
    const Table& table = layout.tables[t];
    STD_TORCH_CHECK(table.dim <= kMaxDim, "table ", t, " has dim ", table.dim,
                    "; on CUDA dims are at most ", kMaxDim);
    STD_TORCH_CHECK(table.weights_offset % at_once == 0, "weights of table ", t,
                    " begin at element ", table.weights_offset, ", not at a multiple of ", at_once);
    for (size_t k = 0; k < infos.size(); ++k) {
      STD_TORCH_CHECK(infos[k].rowwise || table.state_offsets[k] % at_once == 0, infos[k].name,
                      " of table ", t, " begins at element ", table.state_offsets[k],
                      ", not at a multiple of ", at_once);
    }
  }
}

DeviceLayout read_device_layout(const std::optional<Tensor>& device_layout, const Layout& layout,
                                const Tensor& like) {
  STD_TORCH_CHECK(device_layout.has_value(), "device_layout is missing");
  check_tensor("device_layout", *device_layout, ScalarType::Long, 1, &like);
  const size_t bytes =
      layout.tables.size() * sizeof(Table) + layout.features.size() * sizeof(Feature);
  check_size("device_layout", *device_layout, static_cast<int64_t>(bytes / sizeof(int64_t)),
             "numbers of this layout");
  const char* data = static_cast<const char*>(device_layout->const_data_ptr());
  const Table* tables = reinterpret_cast<const Table*>(data);
  return {tables, static_cast<int64_t>(layout.tables.size()),
          reinterpret_cast<const Feature*>(tables + layout.tables.size())};
}

template <class Weight>
Weights<Weight> read_weights(const TableArguments& arguments, const Layout& layout, int64_t lookups,
                             int at_once) {
  const Tensor& first = arguments.weights;
  const ScalarType dtype = first.scalar_type();
  check_tensor("weights", first, dtype, 1, &first);
  check_aligned("weights", first, at_once);
  check_weights_inside(layout, first.numel(), size_of(arguments.managed_weights));
  Weights<Weight> weights{};
  weights.buffers = {first.mutable_data_ptr<Weight>(), first.numel(), nullptr};
  if (arguments.managed_weights.has_value()) {
    check_tensor("managed_weights", *arguments.managed_weights, dtype, 1, &first);
    check_aligned("managed_weights", *arguments.managed_weights, at_once);
    weights.buffers.managed = arguments.managed_weights->mutable_data_ptr<Weight>();
  }
  if (size_of(arguments.cache_locations) > 0) {
    STD_TORCH_CHECK(arguments.cache_weights.has_value(), "cache_locations without cache_weights");
    check_tensor("cache_locations", *arguments.cache_locations, ScalarType::Int, 1, &first);
    check_size("cache_locations", *arguments.cache_locations, lookups, "lookups");
    check_tensor("cache_weights", *arguments.cache_weights, dtype, 2, &first);
    check_aligned("cache_weights", *arguments.cache_weights, at_once);
    weights.cache = arguments.cache_weights->mutable_data_ptr<Weight>();
    weights.cache_stride = arguments.cache_weights->size(1);
    STD_TORCH_CHECK(weights.cache_stride % at_once == 0, "cache_weights has ", weights.cache_stride,
                    " columns, expected a multiple of ", at_once);
    weights.locations = arguments.cache_locations->const_data_ptr<int32_t>();
  }
  return weights;
}

template Weights<float> read_weights(const TableArguments&, const Layout&, int64_t, int);
template Weights<Half> read_weights(const TableArguments&, const Layout&, int64_t, int);
template Weights<BFloat16> read_weights(const TableArguments&, const Layout&, int64_t, int);

std::vector<Buffers<float>> read_states(const Layout& layout, const std::vector<StateInfo>& infos,
                                        const std::vector<Tensor>& states,
                                        const std::optional<std::vector<Tensor>>& managed_states,
                                        const Tensor& like, int at_once) {
  check_state_count("states", states.size(), infos);
  const bool managed = managed_states.has_value();
  if (managed) {
    check_state_count("managed states", managed_states->size(), infos);
  }
  std::vector<Buffers<float>> buffers;
  for (size_t k = 0; k < infos.size(); ++k) {
    check_tensor(infos[k].name, states[k], ScalarType::Float, 1, &like);
    check_aligned(infos[k].name, states[k], at_once);
    if (managed) {
      check_tensor(infos[k].name, (*managed_states)[k], ScalarType::Float, 1, &like);
      check_aligned(infos[k].name, (*managed_states)[k], at_once);
    }
    check_state_inside(layout, infos[k], k, states[k].numel(),
                       managed ? (*managed_states)[k].numel() : 0);
    buffers.push_back({states[k].mutable_data_ptr<float>(), states[k].numel(),
                       managed ? (*managed_states)[k].mutable_data_ptr<float>() : nullptr});
  }
  return buffers;
}

Tensor readable_gradient(const Tensor& grad_output, const Tensor& like, int at_once) {
  STD_TORCH_CHECK(grad_output.device() == like.device(),
                  "grad_output is on another device than the weights");
  const Tensor gradient = torch::stable::contiguous(grad_output);
  return is_aligned(gradient, at_once) ? gradient : torch::stable::clone(gradient);
}

OutputType read_output_type(const char* name, const Tensor& output) {
  const ScalarType dtype = output.scalar_type();
  if (dtype == ScalarType::Float) {
    return OutputType::kFloat;
  }
  if (dtype == ScalarType::Half) {
    return OutputType::kHalf;
  }
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16, name, " has the wrong dtype ", dtype,
                  ", expected Float, Half or BFloat16");
  return OutputType::kBFloat16;
}

GradientSource read_gradient(const Tensor& gradient, float max_gradient, int at_once) {
  GradientSource source{};
  source.gradient = gradient.const_data_ptr();
  source.max_gradient = max_gradient;
  source.type = read_output_type("grad_output", gradient);
  const int64_t most = at_once * int64_t{kNoSource} - 1;
  STD_TORCH_CHECK(gradient.numel() <= most, "grad_output has ", gradient.numel(),
                  " elements; at most ", most, " fit",
                  at_once == 1 ? " where a dim is no multiple of 4" : "");
  return source;
}

Lookups take_lookups(Scratch& scratch, int64_t count, const Layout& layout, bool has_scales) {
  Lookups lookups{};
  lookups.wide_keys = layout.total_rows > int64_t{std::numeric_limits<uint32_t>::max()};
  lookups.keys = scratch.take_keys(count, lookups.wide_keys);
  lookups.positions = scratch.take<uint32_t>(count);
  lookups.sources = scratch.take<uint32_t>(count);
  lookups.scales = has_scales ? scratch.take<float>(count) : nullptr;
  return lookups;
}

}  // namespace torchrec_ext::cuda
