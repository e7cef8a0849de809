#pragma once

// Private to ProcessGroup: what its operations do with the arguments that torch passes.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <string>
#include <vector>

#include "tesserae/comm/torch_backend/process_group.h"

namespace tesserae::comm::arguments {

using Tensors = ProcessGroup::Tensors;

// Each throws InvalidArgument with `title` as the function.

/// "1024 x Float".
std::string contents(const at::Tensor& tensor);
void check_tensor(const char* title, const at::Tensor& tensor);
/// The one tensor of a list of one.
const at::Tensor& only(const char* title, const Tensors& tensors);
int check_rank(const char* title, int64_t rank, int size);
/// `pieces` in the place of a whole: one for each rank, like the other side.
void check_pieces(const char* title, const Tensors& pieces, const at::Tensor& like, int size);
void check_whole(const char* title, const at::Tensor& whole, const at::Tensor& piece, int size);

std::vector<int64_t> counts_of(const Tensors& tensors);
/// Elements for each rank: `rows` of the first dimension, or the same for all.
std::vector<int64_t> counts_of(const char* title, const at::Tensor& tensor, const std::vector<int64_t>& rows, int size);

bool in_a_row(const at::Tensor& tensor);
/// The elements in their order, one after the other; the tensor itself where they are so.
at::Tensor row_of(const at::Tensor& tensor);

/// A tensor that is written: work on `row`, then settle().
struct Written {
  explicit Written(const at::Tensor& tensor, bool read = true)
      : tensor(tensor),
        row(in_a_row(tensor) ? tensor.view(-1)
            : read           ? row_of(tensor)
                             : at::empty({tensor.numel()}, tensor.options())) {}
  void settle() const {
    if (!row.is_alias_of(tensor)) tensor.copy_(row.view(tensor.sizes()));
  }
  at::Tensor tensor, row;
};

/// A reduction of torch: ours, and perhaps a division at the end.
struct Reducer {
  Reducer(const char* title, const c10d::ReduceOp& op, const at::Tensor& tensor);
  void finish(const at::Tensor& sum, int size) const {
    if (average) sum.div_(size);
  }
  Reduction how = Reduction::sum;
  bool average = false;
};

}  // namespace tesserae::comm::arguments
