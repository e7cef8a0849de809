#include "tesserae/data/permutation.h"

#include <bit>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::data {

namespace {

uint64_t mix(uint64_t value) {  // finalizer of SplitMix64
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

constexpr uint64_t golden = 0x9e3779b97f4a7c15u;

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint64_t stream) : size_(size) {
  if (size < 1) throw InvalidArgument("Permutation", cat("size is ", size, "; it must be >= 1"));
  const int bits = std::bit_width(static_cast<uint64_t>(size - 1));
  left_bits_ = bits / 2;
  right_bits_ = bits - left_bits_;
  const uint64_t start = mix(mix(seed + golden) + stream);
  for (size_t i = 0; i < keys_.size(); ++i) keys_[i] = mix(start + golden * (i + 1));
}

int64_t Permutation::operator()(int64_t index) const {
  auto value = static_cast<uint64_t>(index);
  do {
    value = encrypt(value);  // fewer than two times on average: more than half of the numbers are inside
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

uint64_t Permutation::encrypt(uint64_t value) const {
  int left_bits = left_bits_, right_bits = right_bits_;
  for (const uint64_t key : keys_) {
    const uint64_t left = value >> right_bits;
    const uint64_t right = value & ((uint64_t{1} << right_bits) - 1);
    const uint64_t mixed = (left ^ mix(right + key)) & ((uint64_t{1} << left_bits) - 1);
    value = (right << left_bits) | mixed;
    std::swap(left_bits, right_bits);
  }
  return value;
}

}  // namespace tesserae::data
