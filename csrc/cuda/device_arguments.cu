#include "device_arguments.h"

#include <limits>

namespace torchrec_ext::cuda {
namespace {

constexpr uintptr_t kAlignment = 16;

bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
}

void check_aligned(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(is_aligned(tensor), name, " must begin at a multiple of ", kAlignment, " bytes");
}

int64_t size_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->numel() : 0;
}

}  // namespace

void check_alignment(const Layout& layout, const std::vector<StateInfo>& infos) {
  for (size_t t = 0; t < layout.tables.size(); ++t) {
    const Table& table = layout.tables[t];
    STD_TORCH_CHECK(table.dim % kColumnsPerLane == 0 && table.dim <= kMaxDim, "table ", t,
                    " has dim ", table.dim, "; on CUDA dims are multiples of 4 up to ", kMaxDim);
    STD_TORCH_CHECK(table.weights_offset % kColumnsPerLane == 0, "weights of table ", t,
                    " begin at element ", table.weights_offset, ", not at a multiple of 4");
    for (size_t k = 0; k < infos.size(); ++k) {
      STD_TORCH_CHECK(infos[k].rowwise || table.state_offsets[k] % kColumnsPerLane == 0,
                      infos[k].name, " of table ", t, " begins at element ", table.state_offsets[k],
                      ", not at a multiple of 4");
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
Weights<Weight> read_weights(const TableArguments& arguments, const Layout& layout,
                             int64_t lookups) {
  const Tensor& first = arguments.weights;
  const ScalarType dtype = first.scalar_type();
  check_tensor("weights", first, dtype, 1, &first);
  check_aligned("weights", first);
  check_weights_inside(layout, first.numel(), size_of(arguments.managed_weights));
  Weights<Weight> weights{};
  weights.buffers = {first.mutable_data_ptr<Weight>(), first.numel(), nullptr};
  if (arguments.managed_weights.has_value()) {
    check_tensor("managed_weights", *arguments.managed_weights, dtype, 1, &first);
    check_aligned("managed_weights", *arguments.managed_weights);
    weights.buffers.managed = arguments.managed_weights->mutable_data_ptr<Weight>();
  }
  if (size_of(arguments.cache_locations) > 0) {
    STD_TORCH_CHECK(arguments.cache_weights.has_value(), "cache_locations without cache_weights");
    check_tensor("cache_locations", *arguments.cache_locations, ScalarType::Int, 1, &first);
    check_size("cache_locations", *arguments.cache_locations, lookups, "lookups");
    check_tensor("cache_weights", *arguments.cache_weights, dtype, 2, &first);
    check_aligned("cache_weights", *arguments.cache_weights);
    weights.cache = arguments.cache_weights->mutable_data_ptr<Weight>();
    weights.cache_stride = arguments.cache_weights->size(1);
    STD_TORCH_CHECK(weights.cache_stride % kColumnsPerLane == 0, "cache_weights has ",
                    weights.cache_stride, " columns, expected a multiple of 4");
    weights.locations = arguments.cache_locations->const_data_ptr<int32_t>();
  }
  return weights;
}

template Weights<float> read_weights(const TableArguments&, const Layout&, int64_t);
template Weights<Half> read_weights(const TableArguments&, const Layout&, int64_t);
template Weights<BFloat16> read_weights(const TableArguments&, const Layout&, int64_t);

std::vector<Buffers<float>> read_states(const Layout& layout, const std::vector<StateInfo>& infos,
                                        const std::vector<Tensor>& states,
                                        const std::optional<std::vector<Tensor>>& managed_states,
                                        const Tensor& like) {
  check_state_count("states", states.size(), infos);
  const bool managed = managed_states.has_value();
  if (managed) {
    check_state_count("managed states", managed_states->size(), infos);
  }
  std::vector<Buffers<float>> buffers;
  for (size_t k = 0; k < infos.size(); ++k) {
    check_tensor(infos[k].name, states[k], ScalarType::Float, 1, &like);
    check_aligned(infos[k].name, states[k]);
    if (managed) {
      check_tensor(infos[k].name, (*managed_states)[k], ScalarType::Float, 1, &like);
      check_aligned(infos[k].name, (*managed_states)[k]);
    }
    check_state_inside(layout, infos[k], k, states[k].numel(),
                       managed ? (*managed_states)[k].numel() : 0);
    buffers.push_back({states[k].mutable_data_ptr<float>(), states[k].numel(),
                       managed ? (*managed_states)[k].mutable_data_ptr<float>() : nullptr});
  }
  return buffers;
}

Tensor readable_gradient(const Tensor& grad_output, const Tensor& like) {
  STD_TORCH_CHECK(grad_output.device() == like.device(),
                  "grad_output is on another device than the weights");
  const Tensor gradient = torch::stable::contiguous(grad_output);
  return is_aligned(gradient) ? gradient : torch::stable::clone(gradient);
}

GradientSource read_gradient(const Tensor& gradient, float max_gradient) {
  GradientSource source{};
  source.gradient = gradient.const_data_ptr();
  source.max_gradient = max_gradient;
  const ScalarType dtype = gradient.scalar_type();
  source.type = dtype == ScalarType::Float
                    ? GradientType::kFloat
                    : (dtype == ScalarType::Half ? GradientType::kHalf : GradientType::kBFloat16);
  STD_TORCH_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
      "grad_output has the wrong dtype ", dtype, ", expected Float, Half or BFloat16");
  STD_TORCH_CHECK(gradient.numel() / kColumnsPerLane < int64_t{kNoSource}, "grad_output has ",
                  gradient.numel(), " elements; at most 2^34 - 5 fit");
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
