#include "fused_update.h"

#include <memory>

#include "parallel.h"
#include "row_kernel.h"
#include "run_with_capability.h"

namespace torchrec_ext::cpu {
namespace {

constexpr int64_t kRowsPerBlock = 512;

struct Node {
  int64_t begin;
  int64_t end;
  int64_t dim;
};

struct NodeSums {
  std::vector<int64_t> long_rows;  // [segments], or empty where no row is long
  std::unique_ptr<float[]> sums;   // [nodes, max_dim]
};

std::vector<Node> find_nodes(const Layout& layout, const Segments& segments,
                             std::vector<int64_t>& long_rows) {
  std::vector<Node> nodes;
  for (int64_t s = 0; s < segments.count; ++s) {
    const int64_t begin = segments.begins[s];
    const int64_t end = segments.begins[s + 1];
    if (end - begin <= kNode) {
      continue;
    }
    if (long_rows.empty()) {
      long_rows.assign(static_cast<size_t>(segments.count), -1);
    }
    long_rows[static_cast<size_t>(s)] = static_cast<int64_t>(nodes.size());
    const int64_t dim = layout.table_of(segments.rows[s]).dim;
    for (int64_t at = begin; at < end; at += kNode) {
      nodes.push_back({at, std::min(at + kNode, end), dim});
    }
  }
  return nodes;
}

// The rows of more than kNode lookups are summed by all threads, node by node.
NodeSums sum_long_rows(const Layout& layout, const Segments& segments,
                       const GradientSource& source) {
  NodeSums result;
  const std::vector<Node> nodes = find_nodes(layout, segments, result.long_rows);
  const int64_t count = static_cast<int64_t>(nodes.size());
  if (count == 0) {
    return result;
  }
  result.sums.reset(new float[static_cast<size_t>(count * layout.max_dim)]);
  float* sums = result.sums.get();
  for_each_block(count, 1, slice_count(count * kNode), [&](int64_t number, int64_t) {
    std::vector<float> scratch(static_cast<size_t>(layout.max_dim));
    const Node& node = nodes[static_cast<size_t>(number)];
    run_with_best_capability([&]() TORCHREC_EXT_INLINE_LAMBDA {
      source.sum_node(node.begin, node.end, node.dim, sums + number * layout.max_dim,
                      scratch.data());
    });
  });
  return result;
}

template <class Optimizer, class Rounding>
void update_rows(const Optimizer& optimizer, const Rounding& rounding,
                 const UpdateTask<typename Rounding::WeightType>& task, int64_t lookups) {
  for_each_block(
      task.segments.count, kRowsPerBlock, slice_count(lookups), [&](int64_t first, int64_t last) {
        RowRunner<Optimizer, Rounding> runner(optimizer, rounding, task);
        run_with_best_capability([&]() TORCHREC_EXT_INLINE_LAMBDA { runner.run(first, last); });
      });
}

}  // namespace

template <class Index, class Weight>
BadLookup fused_update(const Layout& layout, const Batch<Index>& batch, const Segments* sorted,
                       const float* gradient, Weight* weights, const std::vector<float*>& states,
                       const UpdateOptions& options) {
  OwnedSegments owned;
  Contributions contributions;
  BadLookup bad = find_contributions(layout, batch, contributions);
  if (bad.bag < 0 && sorted == nullptr) {
    bad = sort_by_row(layout, batch, owned);
  }
  if (bad.bag >= 0) {
    return bad;
  }
  const Segments segments = sorted == nullptr ? owned.view() : *sorted;
  const GradientSource source{gradient, segments.positions, &contributions, options.max_gradient};
  const NodeSums node_sums = sum_long_rows(layout, segments, source);
  const UpdateTask<Weight> task{&layout,
                                segments,
                                source,
                                weights,
                                states,
                                node_sums.sums.get(),
                                node_sums.long_rows.empty() ? nullptr : node_sums.long_rows.data()};
  const auto update = [&](const auto& optimizer) {
    with_rounding<Weight>(options, [&](const auto& rounding) {
      update_rows(optimizer, rounding, task, batch.lookups);
    });
  };
  select_optimizer(options.optimizer, options.hyperparameters, static_cast<int64_t>(options.step),
                   update);
  return {};
}

#define TORCHREC_EXT_INSTANTIATE(Index, Weight)                                        \
  template BadLookup fused_update(const Layout&, const Batch<Index>&, const Segments*, \
                                  const float*, Weight*, const std::vector<float*>&,   \
                                  const UpdateOptions&)
TORCHREC_EXT_INSTANTIATE(int32_t, float);
TORCHREC_EXT_INSTANTIATE(int64_t, float);
TORCHREC_EXT_INSTANTIATE(int32_t, Half);
TORCHREC_EXT_INSTANTIATE(int64_t, Half);
TORCHREC_EXT_INSTANTIATE(int32_t, BFloat16);
TORCHREC_EXT_INSTANTIATE(int64_t, BFloat16);
#undef TORCHREC_EXT_INSTANTIATE

}  // namespace torchrec_ext::cpu
