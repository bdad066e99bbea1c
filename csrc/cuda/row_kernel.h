#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../optimizers/optimizer.h"
#include "../rounding.h"
#include "device_layout.h"
#include "dynamic_shared_memory.h"
#include "gradient_sum.h"

namespace torchrec_ext::cuda {

// A batch's lookups and gradients, sorted by row.
struct SortedBatch {
  DeviceLayout layout;
  Segments segments;
  GradientSource source;
  StoredSums stored;
};

// Everything that the update of a batch's rows reads, but for the optimizer and the rounding.
template <class Weight>
struct UpdateTask : SortedBatch {
  Weights<Weight> weights;
  Buffers<float> states[kMaxStates];
  int64_t max_dim;
};

// What changes from step to step, in device memory.
template <class Optimizer>
struct Step {
  Optimizer optimizer;
  int64_t completed_updates;
};

// step_scalars: the completed updates, then the hyperparameters as the bits of doubles.
template <class Optimizer>
__global__ void begin_step_kernel(const int64_t* step_scalars, Step<Optimizer>* step) {
  if (thread_number() != 0) {
    return;
  }
  const double* hyperparameters = reinterpret_cast<const double*>(step_scalars + 1);
  *step = {Optimizer(hyperparameters, step_scalars[0]), step_scalars[0]};
}

// One row's part of an optimizer step, worked on by several lanes.
template <int kAtOnce, class Optimizer, class Rounding>
class RowUpdater {
 public:
  using Weight = typename Rounding::WeightType;
  using Row = typename Optimizer::Row;
  static constexpr bool kReduces = Optimizer::kReductions > 0;

  // sums: where the row's gradient is kept between the reductions and the update, [max_dim] for each
  // group of lanes.
  __device__ __forceinline__ RowUpdater(const Optimizer& optimizer, const Rounding& rounding,
                                        const UpdateTask<Weight>& task, const Lanes<kAtOnce>& lanes,
                                        float* sums)
      : optimizer_(optimizer), rounding_(rounding), task_(task), lanes_(lanes), sums_(sums) {}

  __device__ __forceinline__ void update(uint32_t begin, uint32_t end) {
    begin_ = begin;
    end_ = end;
    const int64_t number = task_.segments.row(begin);
    const Table& table = task_.layout.table_of(number);
    find_row(table, number - table.first_row);
    rounding_.begin_row(static_cast<uint64_t>(number));
    if constexpr (kReduces) {
      if (dim_ > lanes_.columns()) {
        return update_wide();
      }
      return update_narrow();
    }
    const float no_totals[kMaxReductions] = {};
    const Row row = begin_row(no_totals);
    for (int base = 0; base < dim_; base += lanes_.columns()) {
      const Part part = read(base);
      write(part, row);
    }
  }

 private:
  static constexpr int kColumnStates = count_states<Optimizer>(false);
  static constexpr int kRowStates = count_states<Optimizer>(true);
  static constexpr int kSumsAtOnce =
      !kReduces || reduces_in_turn<Optimizer>() ? 1 : Optimizer::kReductions;

  __device__ __forceinline__ void find_row(const Table& table, int64_t row) {
    dim_ = static_cast<int>(table.dim);
    weight_ = task_.weights.row(table, row, task_.segments.positions[begin_]);
    for (int k = 0; k < kColumnStates + kRowStates; ++k) {
      const int64_t width = k < kColumnStates ? table.dim : 1;
      states_[k] = task_.states[k].at(table.state_offsets[k] + row * width);
    }
  }

  // A lane's columns, as they were before the update, and their gradient.
  struct Part {
    LaneColumns<kAtOnce> columns;
    Columns weight;
    Columns gradient;
    float states[kColumnsPerLane][kMaxStates];
  };

  __device__ __forceinline__ Part part_at(int base) const {
    Part part{};
    part.columns = lanes_.columns_at(base, dim_);
    return part;
  }

  __device__ __forceinline__ void load(Part& part) const {
    if (!part.columns.any()) {
      return;
    }
    part.weight = load_columns(weight_ + part.columns.first, part.columns);
    for (int k = 0; k < kColumnStates; ++k) {
      const Columns state = load_columns(states_[k] + part.columns.first, part.columns);
      for (int v = 0; v < kColumnsPerLane; ++v) {
        part.states[v][k] = state.values[v];
      }
    }
  }

  // Weights and states first: they are under way while the gradient is summed.
  __device__ __forceinline__ Part read(int base) const {
    Part part = part_at(base);
    load(part);
    part.gradient = task_.source.sum_row(lanes_, task_.stored, begin_, end_, part.columns);
    return part;
  }

  __device__ __forceinline__ void write(const Part& part, const Row& row) const {
    if (!part.columns.any()) {
      return;
    }
    Weight weights[kColumnsPerLane];
    float states[kColumnsPerLane][kMaxStates];
    for (int v = 0; v < kColumnsPerLane; ++v) {
      for (int k = 0; k < kMaxStates; ++k) {
        states[v][k] = part.states[v][k];
      }
      const float updated =
          optimizer_.column(part.weight.values[v], part.gradient.values[v], states[v], row);
      weights[v] = rounding_(updated, part.columns.column(v));
    }
    store_columns(weight_ + part.columns.first, weights, part.columns);
    for (int k = 0; k < kColumnStates; ++k) {
      const float state[kColumnsPerLane] = {states[0][k], states[1][k], states[2][k], states[3][k]};
      store_columns(states_[k] + part.columns.first, state, part.columns);
    }
  }

  // Sums over columns need the whole gradient before anything is updated. Where the lanes meet all
  // columns in one go, they hold on to what they read.
  __device__ __forceinline__ void update_narrow() {
    const Part part = read(0);
    float totals[kMaxReductions] = {};
    reduce_narrow<0>(part, totals);
    write(part, begin_row(totals));
  }

  template <int kFirst>
  __device__ __forceinline__ void reduce_narrow(const Part& part, float* totals) const {
    float partials[kSumsAtOnce][kColumnsPerLane] = {};
    add_terms<kFirst>(part, totals, partials);
    fold<kFirst>(partials, totals);
    if constexpr (kFirst + kSumsAtOnce < Optimizer::kReductions) {
      reduce_narrow<kFirst + kSumsAtOnce>(part, totals);
    }
  }

  // Elsewhere the gradient is kept in sums_, and weights and states are read once more.
  __device__ __forceinline__ void update_wide() {
    float totals[kMaxReductions] = {};
    reduce_wide<0>(totals);
    const Row row = begin_row(totals);
    for (int base = 0; base < dim_; base += lanes_.columns()) {
      write(read_again(base), row);
    }
  }

  template <int kFirst>
  __device__ __forceinline__ void reduce_wide(float* totals) {
    float partials[kSumsAtOnce][kColumnsPerLane] = {};
    for (int base = 0; base < dim_; base += lanes_.columns()) {
      const Part part = kFirst == 0 ? read(base) : read_again(base);
      add_terms<kFirst>(part, totals, partials);
      if (kFirst == 0 && part.columns.any()) {
        store_columns(sums_ + part.columns.first, part.gradient.values, part.columns);
      }
    }
    fold<kFirst>(partials, totals);
    if constexpr (kFirst + kSumsAtOnce < Optimizer::kReductions) {
      reduce_wide<kFirst + kSumsAtOnce>(totals);
    }
  }

  __device__ __forceinline__ Part read_again(int base) const {
    Part part = part_at(base);
    load(part);
    if (part.columns.any()) {
      part.gradient = load_columns(sums_ + part.columns.first, part.columns);
    }
    return part;
  }

  // The partial sums of reduce_row (row_reduce.h), of sum kFirst and those made with it.
  template <int kFirst>
  __device__ __forceinline__ void add_terms(const Part& part, const float* totals,
                                            float (&partials)[kSumsAtOnce][kColumnsPerLane]) const {
    for (int k = 0; k < kSumsAtOnce && part.columns.any(); ++k) {
      for (int v = 0; v < kColumnsPerLane; ++v) {
        if (part.columns.has(v)) {
          partials[k][v] += reduce_term(optimizer_, kFirst + k, part.weight.values[v],
                                        part.gradient.values[v], part.states[v], totals, dim_);
        }
      }
    }
  }

  template <int kFirst>
  __device__ __forceinline__ void fold(const float (&partials)[kSumsAtOnce][kColumnsPerLane],
                                       float* totals) const {
    for (int k = 0; k < kSumsAtOnce; ++k) {
      totals[kFirst + k] = lanes_.fold(partials[k]);
    }
  }

  // The row's part of the step. One lane reads and writes [rows] states, so that none reads too late.
  __device__ __forceinline__ Row begin_row(const float* totals) {
    if constexpr (Optimizer::kBeginsRow) {
      float row_states[kMaxStates] = {};
      for (int k = 0; k < kRowStates; ++k) {
        row_states[k] = lanes_.lane == 0 ? *states_[kColumnStates + k] : 0.0f;
        row_states[k] = lanes_.broadcast(row_states[k], 0);
      }
      const Row row = optimizer_.begin_row(totals, dim_, row_states);
      for (int k = 0; k < kRowStates && lanes_.lane == 0; ++k) {
        *states_[kColumnStates + k] = row_states[k];
      }
      return row;
    } else if constexpr (!std::is_same_v<Row, NoRow>) {
      return optimizer_.common_row();
    } else {
      return {};
    }
  }

  const Optimizer& optimizer_;
  Rounding rounding_;
  const UpdateTask<Weight>& task_;
  const Lanes<kAtOnce>& lanes_;
  float* sums_;
  uint32_t begin_ = 0;
  uint32_t end_ = 0;
  int dim_ = 0;
  Weight* weight_ = nullptr;
  float* states_[kMaxStates] = {};
};

template <int kAtOnce, class Optimizer, class Rounding>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    update_rows_kernel(const __grid_constant__ UpdateTask<typename Rounding::WeightType> task,
                       const Step<Optimizer>* step, Rounding rounding, int lane_count) {
  const auto lanes = Lanes<kAtOnce>::of(lane_count);
  const Optimizer optimizer = step->optimizer;
  rounding.set_step(static_cast<uint64_t>(step->completed_updates));
  float* sums = nullptr;
  if constexpr (Optimizer::kReductions > 0) {
    sums = dynamic_shared<float>() + lanes.group_in_block() * task.max_dim;
  }
  RowUpdater<kAtOnce, Optimizer, Rounding> updater(optimizer, rounding, task, lanes, sums);
  const int64_t rows = *task.segments.count;
  for (int64_t s = lanes.group(); s < rows; s += lanes.groups()) {
    updater.update(task.segments.begins[s], task.segments.end(s, rows));
  }
}

}  // namespace torchrec_ext::cuda
