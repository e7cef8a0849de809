#include "tesserae/tensor/exchange.h"

#include <ATen/ops/empty.h>

#include "tesserae/base/error.h"

namespace tesserae::tensor {

int64_t dimension_of(const char* function, const at::Tensor& x, int64_t dim) {
  const int64_t from_front = dim < 0 ? dim + x.dim() : dim;
  if (from_front >= 0 && from_front < x.dim()) return from_front;
  throw InvalidArgument(function, cat("a tensor of shape ", x.sizes(), " has no dimension ", dim));
}

int64_t cut_dimension_of(const char* function, const at::Tensor& x, int64_t dim, const Parallel& parallel) {
  const int64_t from_front = dimension_of(function, x, dim);
  if (x.size(from_front) % parallel.size() == 0) return from_front;
  throw InvalidArgument(function, cat("dimension ", from_front, " of a tensor of shape ", x.sizes(),
                                      " cannot be cut in ", parallel.size(), " equal pieces, one for each rank"));
}

at::Tensor to_pieces(const at::Tensor& x, int64_t dim, const Parallel& parallel) {
  const int64_t ranks = parallel.size();
  return x.unflatten(dim, {ranks, x.size(dim) / ranks}).movedim(dim, 0).contiguous();
}

at::Tensor from_pieces(const at::Tensor& pieces, int64_t dim) {
  return pieces.movedim(0, dim).flatten(dim, dim + 1);
}

at::Tensor summed(const at::Tensor& x, const Parallel& parallel) {
  if (parallel.size() == 1) return x;
  at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
  parallel.group().all_reduce(sum);
  return sum;
}

at::Tensor put_together(const at::Tensor& x, int64_t dim, const Parallel& parallel) {
  if (parallel.size() == 1) return x;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.insert(shape.begin(), parallel.size());
  const at::Tensor pieces = at::empty(shape, x.options());
  pieces[parallel.index()].copy_(x);
  parallel.group().all_gather(pieces);
  return from_pieces(pieces, dim);
}

at::Tensor own_piece(const at::Tensor& x, int64_t dim, const Parallel& parallel) {
  if (parallel.size() == 1) return x;
  const int64_t size = x.size(dim) / parallel.size();
  return x.narrow(dim, parallel.index() * size, size).contiguous();
}

at::Tensor summed_piece(const at::Tensor& x, int64_t dim, const Parallel& parallel) {
  if (parallel.size() == 1) return x;
  const at::Tensor pieces = to_pieces(x, dim, parallel);
  at::Tensor sum = at::empty(pieces.sizes().slice(1), pieces.options());
  parallel.group().reduce_scatter_to(sum, pieces);
  return sum;
}

Pending start_gather(const at::Tensor& own, const Parallel& parallel) {
  if (parallel.size() == 1) return {own.unsqueeze(0), {}};
  at::Tensor pieces = at::empty({parallel.size(), own.size(0), own.size(1)}, own.options());
  pieces[parallel.index()].copy_(own);
  return {pieces, parallel.lane().submit([&parallel, pieces] { parallel.group().all_gather(pieces); })};
}

Pending start_reduce_scatter(const at::Tensor& pieces, const Parallel& parallel) {
  if (parallel.size() == 1) return {pieces[0], {}};
  at::Tensor sum = at::empty({pieces.size(1), pieces.size(2)}, pieces.options());
  return {sum, parallel.lane().submit([&parallel, sum, pieces] { parallel.group().reduce_scatter_to(sum, pieces); })};
}

comm::Ticket start_sum(const at::Tensor& x, const Parallel& parallel) {
  if (parallel.size() == 1) return {};
  return parallel.lane().submit([&parallel, x] { parallel.group().all_reduce(x); });
}

}  // namespace tesserae::tensor
