#pragma once

#include <cstdint>

#include "adam.h"
#include "exact_adagrad.h"
#include "exact_rowwise_adagrad.h"
#include "exact_sgd.h"
#include "ftrl.h"
#include "lamb.h"
#include "partial_rowwise_adam.h"

namespace torchrec_ext {

// One line per optimizer: member of OptimType, value string (FBGEMM's where it has the optimizer),
// struct. The order is the numbering of the ops' `optimizer` argument within one build; nothing
// stores it.
#define TORCHREC_EXT_FOR_EACH_OPTIMIZER(X)                                \
  X(EXACT_SGD, "exact_sgd", ExactSgd<false>)                              \
  X(EXACT_ADAGRAD, "exact_adagrad", ExactAdagrad)                         \
  X(EXACT_ROWWISE_ADAGRAD, "exact_row_wise_adagrad", ExactRowWiseAdagrad) \
  X(FTRL, "ftrl", PlainFtrl)                                              \
  X(ADAM, "adam", Adam<false>)                                            \
  X(PARTIAL_ROWWISE_ADAM, "partial_row_wise_adam", PartialRowWiseAdam)    \
  X(LAMB, "lamb", Lamb)

enum class OptimType : int64_t {
#define TORCHREC_EXT_MEMBER(member, value, type) member,
  TORCHREC_EXT_FOR_EACH_OPTIMIZER(TORCHREC_EXT_MEMBER)
#undef TORCHREC_EXT_MEMBER
};

// Stands for an optimizer's struct in a generic lambda.
template <class Optimizer>
struct OptimizerTag {
  using Type = Optimizer;
};

// Calls visit(member, its name, its value string, tag) for every optimizer, in order.
template <class Visitor>
void for_each_optimizer(Visitor&& visit) {
#define TORCHREC_EXT_VISIT(member, value, type) \
  visit(OptimType::member, #member, value, OptimizerTag<type>{});
  TORCHREC_EXT_FOR_EACH_OPTIMIZER(TORCHREC_EXT_VISIT)
#undef TORCHREC_EXT_VISIT
}

// Calls visit(tag) for one optimizer; false if `optimizer` is none.
template <class Visitor>
bool visit_optimizer(OptimType optimizer, Visitor&& visit) {
  bool found = false;
  for_each_optimizer([&](OptimType candidate, const char*, const char*, auto tag) {
    if (candidate == optimizer) {
      found = true;
      visit(tag);
    }
  });
  return found;
}

// Calls visit(optimizer) with the registered optimizer's variant that the hyperparameters choose.
template <class Visitor>
void select_optimizer(OptimType optimizer, const double* hyperparameters, int64_t completed_updates,
                      Visitor&& visit) {
  visit_optimizer(optimizer, [&](auto tag) {
    decltype(tag)::Type::select(hyperparameters, completed_updates, visit);
  });
}

}  // namespace torchrec_ext
