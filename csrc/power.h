#pragma once

#include <bit>
#include <cstdint>

#include "macros.h"

namespace torchrec_ext {

// base^exponent for base >= 0, and exponent >= 0 where base is 0; 0^0 is 1 as in C. Base may not be a
// subnormal double, which no float is.
//
// std::pow gives other bits on other C libraries and is not vectorised. This one uses additions,
// multiplications and one division of doubles in a fixed order, so every CPU, instruction set and
// device gets the same bits. The relative error is about 1e-14 * (1 + |log2 of the result|): log2 by
// the atanh series on [sqrt(1/2), sqrt(2)), exp2 by its Taylor series on [-1/2, 1/2].
TORCHREC_EXT_INLINE double power(double base, double exponent) {
  constexpr double kRoundToInteger =
      6755399441055744.0;  // 1.5 * 2^52: adding it leaves the integer in the low bits
  const uint64_t bits = std::bit_cast<uint64_t>(base);
  // Subtracting the bits of sqrt(1/2) makes the exponent field count from there, hence a mantissa
  // in [sqrt(1/2), sqrt(2)).
  const uint64_t shifted = bits - 0x3FE6A09E667F3BCDull;
  const double mantissa =
      std::bit_cast<double>((shifted & 0x000FFFFFFFFFFFFFull) + 0x3FE6A09E667F3BCDull);
  const uint64_t exponent_field = (shifted >> 52) & 0xFFFull;
  // The 12-bit field is a signed number; flipping its top bit makes it unsigned with bias 2048.
  const double binary_exponent =
      std::bit_cast<double>((exponent_field ^ 0x800ull) | 0x4330000000000000ull) -
      (4503599627370496.0 + 2048.0);
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double s2 = s * s;
  double series = 1.0 / 17.0;
  series = series * s2 + 1.0 / 15.0;
  series = series * s2 + 1.0 / 13.0;
  series = series * s2 + 1.0 / 11.0;
  series = series * s2 + 1.0 / 9.0;
  series = series * s2 + 1.0 / 7.0;
  series = series * s2 + 1.0 / 5.0;
  series = series * s2 + 1.0 / 3.0;
  series = series * s2 + 1.0;
  const double log2_base = binary_exponent + 2.8853900817779268 * s * series;  // 2 / ln(2)

  double y = exponent * log2_base;
  y = y < -1000.0 ? -1000.0 : (y > 1000.0 ? 1000.0 : y);
  const double rounded = y + kRoundToInteger;
  const double x = (y - (rounded - kRoundToInteger)) * 0.6931471805599453;
  double exp = 1.0 / 479001600.0;
  exp = exp * x + 1.0 / 39916800.0;
  exp = exp * x + 1.0 / 3628800.0;
  exp = exp * x + 1.0 / 362880.0;
  exp = exp * x + 1.0 / 40320.0;
  exp = exp * x + 1.0 / 5040.0;
  exp = exp * x + 1.0 / 720.0;
  exp = exp * x + 1.0 / 120.0;
  exp = exp * x + 1.0 / 24.0;
  exp = exp * x + 1.0 / 6.0;
  exp = exp * x + 1.0 / 2.0;
  exp = exp * x + 1.0;
  exp = exp * x + 1.0;
  const double scale = std::bit_cast<double>((std::bit_cast<uint64_t>(rounded) + 1023) << 52);
  const double result = exp * scale;
  const double at_zero = exponent == 0.0 ? 1.0 : 0.0;
  return base == 0.0 ? at_zero : (base == base ? result : base);
}

}  // namespace torchrec_ext
