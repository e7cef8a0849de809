#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tesserae/mesh/transfer.h"

namespace tesserae::mesh {

/// How a tensor is cut among the ranks of a tensor-parallel group, and which part is meant. A value: arithmetic only.
///
/// Dimension `dim` of the whole tensor consists of `blocks` equal blocks, one after the other (a fused query, key and
/// value has three). Each block is cut in `parts` equal runs; part i has the i-th run of every block, in that order.
/// Where `dim` is 0 and blocks is 1, the size need not be divisible by `parts`: runs are then rounded up, and the last
/// parts end with padding, rows that belong to no element of the whole tensor.
struct Split {
  int dim = 0;
  int parts = 1;  ///< 1: the tensor is whole
  int index = 0;  ///< in [0, parts)
  int blocks = 1;

  bool whole() const { return parts == 1; }
  bool operator==(const Split&) const = default;
};

/// "dimension 1 cut in 4 parts", "no split".
std::string to_string(const Split& split);

/// The shape of one part of a tensor of shape `whole`; the same for all parts, padding included. Throws
/// InvalidArgument, naming the numbers of parts that would do, where `split` can not cut it.
std::vector<int64_t> part_shape(const std::vector<int64_t>& whole, const Split& split);

/// Elements of this part that are elements of the whole tensor: they come first in it, padding last.
int64_t part_elements(const std::vector<int64_t>& whole, const Split& split);

/// A tensor that is stored split is stored part after part, each in its own (row-major) order and without padding: the
/// element of the stored order at which this part begins.
int64_t part_begin(const std::vector<int64_t>& whole, const Split& split);

/// The stored order of a split, as its simplest name: without index, and no split where parts lie one after the other
/// in row-major order anyway.
Split stored_order(const std::vector<int64_t>& whole, const Split& split);

/// Where a run of a part lies in another order of the same tensor: calls `visit(from, to)` for the longest runs that
/// are contiguous in both, in ascending order of `from`. `elements`: a run of the part that `split` means, padding is
/// skipped; `to`: of the stored order of `stored` (whose index does not count; whole: plain row-major order), as long
/// as `from`. Takes time in proportion to the number of runs, and no memory. Throws InvalidArgument for elements that
/// no part has.
void for_each_run(const std::vector<int64_t>& whole, const Split& split, const Range& elements, const Split& stored,
                  const std::function<void(const Range& from, const Range& to)>& visit);

}  // namespace tesserae::mesh
