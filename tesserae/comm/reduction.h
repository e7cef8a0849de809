#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <ostream>
#include <string>

namespace tesserae::comm {

/// How a reduction joins the elements of two members. On bool, sum is "or" and product is "and".
enum class Reduction : uint8_t { sum, product, minimum, maximum, bit_and, bit_or, bit_xor };

std::ostream& operator<<(std::ostream& out, Reduction how);
/// What members must agree on, in words: "all_reduce" for a sum, else "all_reduce (maximum)".
std::string verb_of(const char* verb, Reduction how);

/// True if tensors of `dtype` can be reduced in that way: no bits of floating point numbers, no order of complex ones.
bool can_reduce(Reduction how, at::ScalarType dtype);

/// result = left `how` right, element by element; `result` may be `left`. Runs ATen's vectorised kernels.
void reduce_to(const at::Tensor& result, const at::Tensor& left, const at::Tensor& right, Reduction how);

/// Joins what several members bring, in the order in which they are taken. Sums and products of bf16 and fp16 are
/// formed in fp32 and rounded once, at the end, however many members there are.
class RunningReduction {
 public:
  /// `result`: gets the outcome; `first`: what the first of `members` brings, perhaps in the same memory.
  /// `scale`: of a sum, which is multiplied by it in the end.
  RunningReduction(at::Tensor result, const at::Tensor& first, int members, Reduction how, double scale = 1);
  /// Takes the next one. After the last, `result` is complete.
  void join(const at::Tensor& next);

 private:
  at::Tensor result_, so_far_;
  int left_;  // members to come
  Reduction how_;
  double scale_;
};

}  // namespace tesserae::comm
