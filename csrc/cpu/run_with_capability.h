#pragma once

#include "capability.h"

namespace torchrec_ext::cpu {

// `flatten` inlines the loops into each function, so that they are compiled for its instruction
// set.
template <class Body>
struct Compiled {
#if defined(__x86_64__)
  [[gnu::target("arch=x86-64-v4,prefer-vector-width=512"),
    gnu::flatten]] static void avx512(const Body& body) {
    body();
  }
  [[gnu::target("arch=x86-64-v3"), gnu::flatten]] static void avx2(const Body& body) { body(); }
#endif
  [[gnu::flatten]] static void fallback(const Body& body) { body(); }
};

template <class Body>
void run_with_best_capability(const Body& body) {
#if defined(__x86_64__)
  if (capability() == Capability::kAvx512) {
    return Compiled<Body>::avx512(body);
  }
  if (capability() == Capability::kAvx2) {
    return Compiled<Body>::avx2(body);
  }
#endif
  Compiled<Body>::fallback(body);
}

}  // namespace torchrec_ext::cpu
