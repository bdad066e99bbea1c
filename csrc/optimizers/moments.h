#pragma once

#include <cmath>
#include <cstdint>

#include "../macros.h"
#include "../power.h"

namespace torchrec_ext {

// Adam's bias corrections after t updates, made of doubles:
//   mhat = m / (1 - beta1^t),  sqrt(vhat) = sqrt(v) * root_correction
struct BiasCorrection {
  float mean_correction;  // 1 / (1 - beta1^t)
  float root_correction;  // 1 / sqrt(1 - beta2^t)

  static TORCHREC_EXT_INLINE BiasCorrection after(double t, double beta1, double beta2) {
    return {static_cast<float>(1.0 / (1.0 - power(beta1, t))),
            static_cast<float>(1.0 / std::sqrt(1.0 - power(beta2, t)))};
  }
};

// The exponential moving averages of the gradient and of its square.
struct Moments {
  float beta1;
  float beta2;
  float one_minus_beta1;
  float one_minus_beta2;

  TORCHREC_EXT_INLINE Moments(double beta1, double beta2)
      : beta1(static_cast<float>(beta1)),
        beta2(static_cast<float>(beta2)),
        one_minus_beta1(static_cast<float>(1.0 - beta1)),
        one_minus_beta2(static_cast<float>(1.0 - beta2)) {}

  TORCHREC_EXT_INLINE float mean(float m, float g) const { return beta1 * m + one_minus_beta1 * g; }
  TORCHREC_EXT_INLINE float square(float v, float g_squared) const {
    return beta2 * v + one_minus_beta2 * g_squared;
  }
};

}  // namespace torchrec_ext
