#pragma once

#include "macros.h"

namespace torchrec_ext {

// FBGEMM's WeightDecayMode. L2 adds weight_decay * weight to the gradient; DECOUPLE multiplies the
// previous weight by 1 - learning_rate * weight_decay before the update (AdamW's ordering).
enum class WeightDecayMode { kNone = 0, kL2 = 1, kDecouple = 2 };

struct WeightDecay {
  float l2 = 0.0f;
  float rate = 0.0f;  // learning_rate * weight_decay

  TORCHREC_EXT_INLINE WeightDecay(double learning_rate, double weight_decay, double mode) {
    if (static_cast<WeightDecayMode>(static_cast<int>(mode)) == WeightDecayMode::kL2) {
      l2 = static_cast<float>(weight_decay);
    } else if (static_cast<WeightDecayMode>(static_cast<int>(mode)) == WeightDecayMode::kDecouple) {
      rate = static_cast<float>(learning_rate * weight_decay);
    }
  }

  TORCHREC_EXT_INLINE float gradient(float weight, float g) const { return g + l2 * weight; }
  // Not weight * (1 - rate): near 1, a float's error would shift the rate itself, step after step.
  TORCHREC_EXT_INLINE float weight(float weight) const { return weight - rate * weight; }
};

}  // namespace torchrec_ext
