#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tesserae::model {

/// Rotary positions (Su et al., 2021, arXiv:2104.09864): the pair of features (2i, 2i + 1) of position t is turned by
/// the angle t * base^(-2i / head dimension), so that dot products depend on distances only. Holds a table, no
/// parameters; the table is made when it is first needed on a device. Used from one thread.
class Rotary {
 public:
  Rotary(int64_t head_dimension, double base) : head_dimension_(head_dimension), base_(base) {}

  /// Turns x [batch, time, heads, head dimension], in fp32 inside; the result has x's dtype. Positions are 0, 1, ...
  /// along time, or `positions` [time] (int64), all below `length`.
  at::Tensor rotate(const at::Tensor& x);
  at::Tensor rotate(const at::Tensor& x, const at::Tensor& positions, int64_t length);

 private:
  at::Tensor turned(const at::Tensor& x, const at::Tensor& by) const;
  at::Tensor table(int64_t time, c10::Device device);  // [time, 1, head dimension / 2], complex: cos + i sin

  int64_t head_dimension_;
  double base_;
  at::Tensor table_;
};

}  // namespace tesserae::model
