#pragma once

#include <cstdint>
#include <vector>

#include "../catch_up.h"
#include "../lookup.h"
#include "fused_update.h"

namespace torchrec_ext::cpu {

// Brings rows up to date: rows[0 .. count), numbered across tables, ascending; null: all rows.
// row_steps [total rows] holds the update that each row is current to, and is set to history.now.
template <class Weight>
void catch_up(const Layout& layout, const int64_t* rows, int64_t count, Weight* weights,
              const std::vector<float*>& states, int32_t* row_steps, const History& history,
              const UpdateOptions& options);

}  // namespace torchrec_ext::cpu
