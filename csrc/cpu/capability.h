#pragma once

namespace torchrec_ext::cpu {

// The instruction sets that the loops over columns are compiled for; all give the same bits.
enum class Capability { kDefault, kAvx2, kAvx512 };

// The best capability of this CPU, lowered by the environment variable TORCHREC_EXT_CPU_CAPABILITY
// (default, avx2, avx512) or by set_capability.
Capability capability();

// For tests. Asking for more than the CPU has throws std::invalid_argument.
void set_capability(Capability capability);

Capability capability_from_name(const char* name);
const char* capability_name(Capability capability);

}  // namespace torchrec_ext::cpu
