#include "tesserae/comm/reduction.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::comm {

std::ostream& operator<<(std::ostream& out, Reduction how) {
  constexpr const char* names[] = {"sum", "product", "minimum", "maximum", "bitwise and", "bitwise or", "bitwise xor"};
  return out << names[static_cast<size_t>(how)];
}

std::string verb_of(const char* verb, Reduction how) {
  return how == Reduction::sum ? verb : cat(verb, " (", how, ")");
}

bool can_reduce(Reduction how, at::ScalarType dtype) {
  const bool plain = dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble;
  const bool integral = c10::isIntegralType(dtype, /*includeBool=*/true) && c10::elementSize(dtype) <= 8 &&
                        !c10::isBarebonesUnsignedType(dtype);
  switch (how) {
    case Reduction::sum:
    case Reduction::product:
      return plain || integral || dtype == at::kComplexFloat || dtype == at::kComplexDouble;
    case Reduction::minimum:
    case Reduction::maximum:
      return plain || integral;
    default:
      return integral;
  }
}

void reduce_to(const at::Tensor& result, const at::Tensor& left, const at::Tensor& right, Reduction how) {
  auto& out = const_cast<at::Tensor&>(result);
  switch (how) {
    case Reduction::sum:
      at::add_out(out, left, right);
      return;
    case Reduction::product:
      at::mul_out(out, left, right);
      return;
    case Reduction::minimum:
      at::minimum_out(out, left, right);
      return;
    case Reduction::maximum:
      at::maximum_out(out, left, right);
      return;
    case Reduction::bit_and:
      at::bitwise_and_out(out, left, right);
      return;
    case Reduction::bit_or:
      at::bitwise_or_out(out, left, right);
      return;
    case Reduction::bit_xor:
      at::bitwise_xor_out(out, left, right);
      return;
  }
}

RunningReduction::RunningReduction(at::Tensor result, const at::Tensor& first, int members, Reduction how, double scale)
    : result_(std::move(result)), so_far_(first), left_(members - 1), how_(how), scale_(scale) {
  const auto dtype = first.scalar_type();
  const bool rounds = how == Reduction::sum || how == Reduction::product;
  const bool wide = left_ > 1 && rounds && (dtype == at::kBFloat16 || dtype == at::kHalf);
  if (wide) so_far_ = first.to(at::kFloat);
}

void RunningReduction::join(const at::Tensor& next) {
  const bool wide = so_far_.scalar_type() != result_.scalar_type();
  const at::Tensor& sum = wide ? so_far_ : result_;
  reduce_to(sum, so_far_, next, how_);
  so_far_ = sum;
  if (--left_ > 0) return;
  if (scale_ != 1) so_far_.mul_(scale_);
  if (wide) result_.copy_(so_far_);
}

}  // namespace tesserae::comm
