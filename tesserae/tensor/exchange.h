#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tesserae/comm/lane.h"
#include "tesserae/tensor/parallel.h"

namespace tesserae::tensor {

// What the functions of this layer send, without autograd. With one rank these return what they are given.

/// A tensor [T, ...]: its pieces along a dimension, one after the other, in contiguous memory; and back.
at::Tensor to_pieces(const at::Tensor& x, int64_t dim, const Parallel& parallel);
at::Tensor from_pieces(const at::Tensor& pieces, int64_t dim);

/// `dim` counted from the front. Throws InvalidArgument, as `function`, if x has no such dimension.
int64_t dimension_of(const char* function, const at::Tensor& x, int64_t dim);
/// The same, and that it can be cut in T equal pieces.
int64_t cut_dimension_of(const char* function, const at::Tensor& x, int64_t dim, const Parallel& parallel);

at::Tensor summed(const at::Tensor& x, const Parallel& parallel);
at::Tensor put_together(const at::Tensor& x, int64_t dim, const Parallel& parallel);
at::Tensor own_piece(const at::Tensor& x, int64_t dim, const Parallel& parallel);
at::Tensor summed_piece(const at::Tensor& x, int64_t dim, const Parallel& parallel);

/// A tensor that is being received. Wait before it is used, or dropped.
struct Pending {
  at::Tensor tensor;
  comm::Ticket ticket;
};

/// [T, rows, width] of which [t, ...] is `own` [rows, width], on its way from the others.
Pending start_gather(const at::Tensor& own, const Parallel& parallel);
/// The sum over all ranks of `pieces[t]`, pieces [T, rows, width]: [rows, width] on its way.
Pending start_reduce_scatter(const at::Tensor& pieces, const Parallel& parallel);
/// `x`, contiguous, is summed in place.
comm::Ticket start_sum(const at::Tensor& x, const Parallel& parallel);

}  // namespace tesserae::tensor
