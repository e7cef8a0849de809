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

/// result = left `how` right, element by element, in the tensors' own dtype: a reduction over members is rounded once
/// per step, in the order in which the members are taken. Reduce in fp32 where bf16's eight bits are too few (the
/// engine's reduce dtype). `result` may be `left`. Runs ATen's vectorised kernels.
void reduce_to(const at::Tensor& result, const at::Tensor& left, const at::Tensor& right, Reduction how);

}  // namespace tesserae::comm
