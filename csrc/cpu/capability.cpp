#include "capability.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace torchrec_ext::cpu {
namespace {

constexpr const char* kNames[] = {"default", "avx2", "avx512"};

Capability best_capability() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Capability::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("fma")) {
    return Capability::kAvx2;
  }
#endif
  return Capability::kDefault;
}

Capability checked(Capability wanted) {
  if (wanted > best_capability()) {
    throw std::invalid_argument(std::string("CPU capability '") + capability_name(wanted) +
                                "' asked for, but this CPU has only '" +
                                capability_name(best_capability()) + "'");
  }
  return wanted;
}

std::atomic<Capability>& chosen() {
  static std::atomic<Capability> value = [] {
    const char* name = std::getenv("TORCHREC_EXT_CPU_CAPABILITY");
    return name == nullptr ? best_capability() : checked(capability_from_name(name));
  }();
  return value;
}

}  // namespace

Capability capability() { return chosen().load(std::memory_order_relaxed); }

void set_capability(Capability capability) { chosen().store(checked(capability)); }

Capability capability_from_name(const char* name) {
  for (int k = 0; k < 3; ++k) {
    if (std::strcmp(kNames[k], name) == 0) {
      return static_cast<Capability>(k);
    }
  }
  throw std::invalid_argument(std::string("unknown CPU capability '") + name +
                              "': use default, avx2 or avx512");
}

const char* capability_name(Capability capability) { return kNames[static_cast<int>(capability)]; }

}  // namespace torchrec_ext::cpu
