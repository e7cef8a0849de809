#pragma once

#include <cstdint>

#include "tesserae/base/error.h"

namespace tesserae {

/// a * b, or InvalidArgument naming both when the product does not fit in 64 bits.
inline int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) throw InvalidArgument("checked_mul", cat(a, " * ", b, " overflows"));
  return product;
}

/// a + b, or InvalidArgument naming both when the sum does not fit in 64 bits.
inline int64_t checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) throw InvalidArgument("checked_add", cat(a, " + ", b, " overflows"));
  return sum;
}

/// The smallest multiple of `unit` (> 0) that is not below `value` (>= 0).
inline int64_t round_up(int64_t value, int64_t unit) {
  return checked_add(value, unit - 1) / unit * unit;
}

}  // namespace tesserae
