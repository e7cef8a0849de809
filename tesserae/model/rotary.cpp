#include "tesserae/model/rotary.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/InferenceMode.h>

#include <bit>
#include <cmath>

namespace tesserae::model {

at::Tensor Rotary::rotate(const at::Tensor& x) {
  return turned(x, table(x.size(1), x.device()));
}

at::Tensor Rotary::rotate(const at::Tensor& x, const at::Tensor& positions, int64_t length) {
  return turned(x, table(length, x.device()).index_select(0, positions));
}

at::Tensor Rotary::turned(const at::Tensor& x, const at::Tensor& by) const {
  // One product of complex numbers turns all pairs: fewer passes over memory than products with cosines and sines.
  const auto pairs = x.to(at::kFloat).unflatten(-1, {head_dimension_ / 2, 2});
  const auto turned = at::view_as_complex(pairs).mul(by);
  return at::view_as_real(turned).flatten(-2).to(x.scalar_type());
}

at::Tensor Rotary::table(int64_t time, c10::Device device) {
  if (!table_.defined() || table_.device() != device || table_.size(0) < time) {
    // A table made during evaluation serves training too: it must not be an inference tensor.
    const c10::InferenceMode normal(false);
    const auto length = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(time)));
    const auto options = at::TensorOptions().dtype(at::kDouble);
    const auto exponents = at::arange(0, head_dimension_, 2, options).div_(-static_cast<double>(head_dimension_));
    const auto angles = at::outer(at::arange(length, options), exponents.mul_(std::log(base_)).exp_());
    table_ = at::complex(angles.cos(), angles.sin()).to(at::kComplexFloat).unsqueeze(1).to(device);
  }
  return table_.slice(0, 0, time);
}

}  // namespace tesserae::model
