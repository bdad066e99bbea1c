#include "per_sample_weight_grad.h"

#include <vector>

#include "../row_reduce.h"
#include "gradient_sum.h"
#include "parallel.h"
#include "run_with_capability.h"

namespace torchrec_ext::cpu {
namespace {

template <class Index, class Weight>
struct WeightGradient {
  const Layout& layout;
  const Batch<Index>& batch;
  const float* gradient;
  const Weight* weights;
  const int32_t* feature_requires_grad;
  float max_gradient;
  float* out;

  TORCHREC_EXT_INLINE BadLookup run(int64_t first_bag, int64_t last_bag) const {
    return visit_bags(batch, first_bag, last_bag,
                      [this](int64_t bag, int64_t begin, int64_t end)
                          TORCHREC_EXT_INLINE_LAMBDA { return run_bag(bag, begin, end); });
  }

  TORCHREC_EXT_INLINE int64_t run_bag(int64_t bag, int64_t begin, int64_t end) const {
    const int64_t f = batch.feature_of(bag);
    const Feature& feature = layout.features[static_cast<size_t>(f)];
    const Table& table = layout.table_of_feature(f);
    const float* g = gradient + batch.gradient_offset(begin, bag, f, feature, table.dim);
    const bool required = feature_requires_grad == nullptr || feature_requires_grad[f] != 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t index = batch.indices[i];
      if (index < 0 || index >= table.rows) {
        return i;
      }
      const Weight* row = weights + table.weights_offset + index * table.dim;
      const float product = reduce_row(table.dim, [&](int64_t column) TORCHREC_EXT_INLINE_LAMBDA {
        return clip(g[column], max_gradient) * static_cast<float>(row[column]);
      });
      out[i] = required ? product * batch.scale(i, end - begin) : 0.0f;
    }
    return -1;
  }
};

}  // namespace

template <class Index, class Weight>
BadLookup per_sample_weight_grad(const Layout& layout, const Batch<Index>& batch,
                                 const float* gradient, const Weight* weights,
                                 const int32_t* feature_requires_grad, float max_gradient,
                                 float* gradient_of_weights) {
  const WeightGradient<Index, Weight> body{
      layout, batch, gradient, weights, feature_requires_grad, max_gradient, gradient_of_weights};
  const int64_t slices = slice_count(batch.lookups);
  std::vector<BadLookup> bad(static_cast<size_t>(slices));
  for_each_slice(batch.bags, slices, [&](int64_t slice, int64_t first, int64_t last) {
    run_with_best_capability([&]() TORCHREC_EXT_INLINE_LAMBDA {
      bad[static_cast<size_t>(slice)] = body.run(first, last);
    });
  });
  return first_bad(bad);
}

#define TORCHREC_EXT_INSTANTIATE(Index, Weight)                                               \
  template BadLookup per_sample_weight_grad(const Layout&, const Batch<Index>&, const float*, \
                                            const Weight*, const int32_t*, float, float*)
TORCHREC_EXT_INSTANTIATE(int32_t, float);
TORCHREC_EXT_INSTANTIATE(int64_t, float);
TORCHREC_EXT_INSTANTIATE(int32_t, Half);
TORCHREC_EXT_INSTANTIATE(int64_t, Half);
TORCHREC_EXT_INSTANTIATE(int32_t, BFloat16);
TORCHREC_EXT_INSTANTIATE(int64_t, BFloat16);
#undef TORCHREC_EXT_INSTANTIATE

}  // namespace torchrec_ext::cpu
