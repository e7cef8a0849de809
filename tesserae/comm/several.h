#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tesserae/comm/group.h"

namespace tesserae::comm {

// Collectives of several buffers, each of which is cut in pieces by itself: large ones one after the other, each in
// place; small ones of a dtype packed into one, since a collective costs its latency. Arguments, and what is thrown,
// are those of the Group's verb for each buffer; all members bring as many, of the same sizes, in the same order.

void all_gather(Group& group, const std::vector<at::Tensor>& buffers, const Label& label, Wire wire = Wire::exact);

/// One buffer of a reduce_scatter: the sum of this member's piece is left there or, times `scale`, in `output` (see
/// Group::reduce_scatter_scaled).
struct ReduceScatter {
  at::Tensor buffer;
  at::Tensor output = {};  ///< as large as a piece; undefined: in place
  double scale = 1;
};

void reduce_scatter(Group& group, const std::vector<ReduceScatter>& all, const Label& label, Wire wire = Wire::exact);

void all_reduce(Group& group, const std::vector<at::Tensor>& buffers, const Label& label, Wire wire = Wire::exact);

}  // namespace tesserae::comm
