#include "catch_up.h"
#include "host_arguments.h"
#include "ops.h"

namespace torchrec_ext::cpu {
namespace {

History read_history(const Tensor& history, int64_t start, int64_t window, int64_t now) {
  check_tensor("history", history, ScalarType::Double, 2);
  STD_TORCH_CHECK(history.size(0) == 3 && start >= 0 && window >= 0 && now >= start &&
                      now - start < history.size(1),
                  "history of shape [", history.size(0), ", ", history.size(1), "] starts at ",
                  start, " and cannot reach ", now);
  const double* values = history.const_data_ptr<double>();
  const int64_t capacity = history.size(1);
  return {values, values + capacity, values + 2 * capacity, start, window, now};
}

void check_catches_up(const UpdateOptions& options) {
  select_optimizer(
      options.optimizer, options.hyperparameters, 0, []<class Optimizer>(const Optimizer&) {
        STD_TORCH_CHECK(Optimizer::kCatchesUp, "this optimizer cannot catch up rows that slept");
      });
}

// Every row must be within the history, and rows must be ascending: the loop relies on it.
void check_rows(const Layout& layout, const int64_t* rows, int64_t count, const int32_t* row_steps,
                const History& history) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = rows == nullptr ? i : rows[i];
    STD_TORCH_CHECK(row >= 0 && row < layout.total_rows, "row ", row, " of ", layout.total_rows);
    STD_TORCH_CHECK(rows == nullptr || i == 0 || rows[i - 1] < row, "rows are not ascending");
    STD_TORCH_CHECK(row_steps[row] >= history.start, "row ", row, " is current to update ",
                    row_steps[row], ", but the history starts at ", history.start);
  }
}

}  // namespace

void catch_up_cpu(Tensor weights, std::vector<Tensor> states, Tensor row_steps, Tensor table_layout,
                  std::optional<Tensor> rows, Tensor history, int64_t history_start, int64_t window,
                  int64_t now, int64_t optimizer, std::vector<double> hyperparameters,
                  bool stochastic_rounding, int64_t seed) {
  const OptimizerArguments arguments(optimizer, hyperparameters, 0.0, stochastic_rounding, seed,
                                     now);
  check_catches_up(arguments.options);
  const Layout layout = read_tables(table_layout, arguments.state_count());
  check_weights(layout, weights);
  const std::vector<float*> state_pointers = read_states(layout, arguments.infos, states);
  check_tensor("row_steps", row_steps, ScalarType::Int, 1);
  STD_TORCH_CHECK(row_steps.numel() == layout.total_rows, "row_steps has ", row_steps.numel(),
                  " elements for ", layout.total_rows, " rows");
  if (rows.has_value()) {
    check_tensor("rows", *rows, ScalarType::Long, 1);
  }
  const int64_t* row_numbers = rows.has_value() ? rows->const_data_ptr<int64_t>() : nullptr;
  const int64_t count = rows.has_value() ? rows->numel() : layout.total_rows;
  const History past = read_history(history, history_start, window, now);
  int32_t* steps = row_steps.mutable_data_ptr<int32_t>();
  check_rows(layout, row_numbers, count, steps, past);
  dispatch_weight(weights, [&]<class Weight>(Weight*) {
    catch_up(layout, row_numbers, count, weights.mutable_data_ptr<Weight>(), state_pointers, steps,
             past, arguments.options);
  });
}

}  // namespace torchrec_ext::cpu
