#include "catch_up.h"

#include <type_traits>

#include "parallel.h"
#include "row_access.h"
#include "run_with_capability.h"

namespace torchrec_ext::cpu {
namespace {

constexpr int64_t kRowsPerBlock = 128;

template <class Optimizer, class Rounding>
struct CatchUpRunner {
  using Weight = typename Rounding::WeightType;
  using Access = RowAccess<Optimizer, Weight>;

  const Optimizer& optimizer;
  Rounding rounding;
  Access access;
  const int64_t* rows;
  int32_t* row_steps;
  const History& history;

  TORCHREC_EXT_INLINE int64_t row_number(int64_t i) const { return rows == nullptr ? i : rows[i]; }

  TORCHREC_EXT_INLINE bool sleeps(int64_t i) const {
    return row_steps[row_number(i)] < history.now;
  }

  TORCHREC_EXT_INLINE void run(int64_t first, int64_t last) {
    const Table* table = &access.layout->table_of(row_number(first));
    const Table* ahead_table = table;
    for (int64_t i = first - kRowsAhead; i < last; ++i) {
      const int64_t ahead = i + kRowsAhead;
      if (ahead < last && sleeps(ahead)) {
        const int64_t row = Access::advance(row_number(ahead), ahead_table);
        access.prefetch(*ahead_table, row);
      }
      if (i >= first && sleeps(i)) {
        catch_up(i, table);
      }
    }
  }

  TORCHREC_EXT_INLINE void catch_up(int64_t i, const Table*& table) {
    const int64_t number = row_number(i);
    const int64_t row = Access::advance(number, table);
    float* states[kMaxStates] = {};
    for (int k = 0; k < Access::kStates; ++k) {
      states[k] = access.state(k, *table, row);
    }
    const CatchUp scalars = CatchUp::after(history, row_steps[number], optimizer.catch_up_eps());
    rounding.begin_row(static_cast<uint64_t>(number));
    catch_up_row(optimizer, rounding, access.weight(*table, row), states, scalars, table->dim);
    row_steps[number] = static_cast<int32_t>(history.now);
  }
};

}  // namespace

template <class Weight>
void catch_up(const Layout& layout, const int64_t* rows, int64_t count, Weight* weights,
              const std::vector<float*>& states, int32_t* row_steps, const History& history,
              const UpdateOptions& options) {
  const auto run = [&](const auto& optimizer, const auto& rounding) {
    using Optimizer = std::decay_t<decltype(optimizer)>;
    using Rounding = std::decay_t<decltype(rounding)>;
    for_each_block(count, kRowsPerBlock, slice_count(count), [&](int64_t first, int64_t last) {
      CatchUpRunner<Optimizer, Rounding> runner{optimizer, rounding,  {&layout, weights, &states},
                                                rows,      row_steps, history};
      run_with_best_capability([&]() TORCHREC_EXT_INLINE_LAMBDA { runner.run(first, last); });
    });
  };
  const auto with_optimizer = [&](const auto& optimizer) {
    if constexpr (std::decay_t<decltype(optimizer)>::kCatchesUp) {
      with_rounding<Weight>(options, [&](const auto& rounding) { run(optimizer, rounding); });
    }
  };
  select_optimizer(options.optimizer, options.hyperparameters, static_cast<int64_t>(options.step),
                   with_optimizer);
}

template void catch_up(const Layout&, const int64_t*, int64_t, float*, const std::vector<float*>&,
                       int32_t*, const History&, const UpdateOptions&);
template void catch_up(const Layout&, const int64_t*, int64_t, Half*, const std::vector<float*>&,
                       int32_t*, const History&, const UpdateOptions&);
template void catch_up(const Layout&, const int64_t*, int64_t, BFloat16*,
                       const std::vector<float*>&, int32_t*, const History&, const UpdateOptions&);

}  // namespace torchrec_ext::cpu
