#include "device_arguments.h"
#include "look_up_rows.h"
#include "ops.h"
#include "queue.h"

namespace torchrec_ext::cuda {

void lookup_cuda(Tensor output, Tensor weights, Tensor table_layout, Tensor feature_table_map,
                 Tensor indices, Tensor offsets, std::optional<Tensor> per_sample_weights,
                 int64_t pooling_mode, std::optional<Tensor> feature_bags,
                 std::optional<Tensor> gradient_offsets, std::optional<Tensor> device_layout) {
  const Layout layout = read_layout_of_any(table_layout, feature_table_map);
  check_alignment(layout, {}, 1);
  const DeviceLayout on_device = read_device_layout(device_layout, layout, weights);
  check_tensor("output", output, output.scalar_type(), output.dim(), &weights);
  const Output to{output.mutable_data_ptr(), read_output_type("output", output), output.numel()};
  dispatch(indices, weights, [&]<class Index, class Weight>(Index*, Weight*) {
    const auto batch =
        read_batch<Index>(layout, {indices, offsets, per_sample_weights, feature_bags,
                                   gradient_offsets, pooling_from(pooling_mode), &weights});
    check_output_shape("output", output, layout, batch);
    const std::optional<Tensor> none;
    const auto placed = read_weights<Weight>({weights, none, none, none}, layout, batch.lookups, 1);
    const CurrentQueue queue(weights);
    look_up_rows(queue.get(), on_device, layout.max_dim, batch,
                 static_cast<const Weight*>(placed.buffers.first), to);
  });
}

}  // namespace torchrec_ext::cuda
