#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tesserae/mesh/axis.h"
#include "tesserae/mesh/transfer.h"

namespace tesserae::mesh {

/// How a tensor is cut among the ranks of an axis, and which part is meant. A value: arithmetic only.
///
/// Dimension `dim` of the whole tensor consists of `blocks` equal blocks, one after the other (a fused query, key and
/// value has three). Each block is cut in `parts` equal runs; part i has the i-th run of every block, in that order.
/// Where `dim` is 0 and blocks is 1, the size need not be divisible by `parts`: runs are then rounded up, and the last
/// parts end with padding, rows that belong to no element of the whole tensor.
struct Split {
  int dim = 0;
  int parts = 1;  ///< 1: the tensor is whole
  int index = 0;  ///< in [0, parts): the rank's index on the axis
  int blocks = 1;
  Axis axis = Axis::tensor;

  bool whole() const { return parts == 1; }
  bool operator==(const Split&) const = default;
};

/// How a tensor is cut along the axes of a mesh: not at all, along one axis, or along two. The second split cuts what
/// the first one leaves, so `Splits(experts, columns)` has part (i, j): part j of part i; parts count in the order
/// (0, 0), (0, 1), ..., (1, 0), ... Both may cut the same dimension, the second then within the runs of the first.
class Splits {
 public:
  Splits() = default;
  Splits(const Split& split) : Splits(split, {}) {}  // NOLINT: one split is a special case of two
  Splits(const Split& first, const Split& second);

  bool whole() const { return first_.whole() && second_.whole(); }
  const Split& first() const { return first_; }    ///< whole if there is none
  const Split& second() const { return second_; }  ///< whole if there are less than two
  /// The split along that axis; whole if there is none.
  const Split& along(Axis axis) const;

  bool operator==(const Splits&) const = default;

 private:
  Split first_, second_;
};

/// The axes on which the ranks differ that shard the state of a tensor cut so: those that hold the same part. An
/// expert's are fewer (axes::expert_state); all else, also what tensor-parallel ranks hold parts of, has axes::state.
AxisSet state_axes(const Splits& splits);

/// "dimension 1 cut in 4 parts", "dimension 0 cut in 2 parts over expert, then dimension 1 cut in 4 parts", "no split".
std::string to_string(const Splits& splits);

// Each of the functions below throws InvalidArgument, naming the numbers of parts that would do, where the splits
// cannot cut a tensor of shape `whole`: also where two are along the same axis, or where the first one pads dimension 0
// and the second one cuts it again (padding would not be last).

/// The shape of one part of a tensor of shape `whole`; the same for all parts, padding included.
std::vector<int64_t> part_shape(const std::vector<int64_t>& whole, const Splits& splits);

/// Elements of this part that are elements of the whole tensor: they come first in it, padding last.
int64_t part_elements(const std::vector<int64_t>& whole, const Splits& splits);

/// A tensor that is stored split is stored part after part, each in its own (row-major) order and without padding: the
/// element of the stored order at which this part begins.
int64_t part_begin(const std::vector<int64_t>& whole, const Splits& splits);

/// The inverse: the part in which that element of the stored order lies, as `splits` with other indices. Throws
/// InvalidArgument for an element that the tensor does not have.
Splits part_at(const std::vector<int64_t>& whole, const Splits& splits, int64_t element);

/// The stored order of splits, as its simplest name: without indices, and without a split whose parts lie one after the
/// other in row-major order anyway.
Splits stored_order(const std::vector<int64_t>& whole, const Splits& splits);

/// Where a run of a part lies in another order of the same tensor: calls `visit(from, to)` for the longest runs that
/// are contiguous in both, in ascending order of `from`. `elements`: a run of the part that `splits` means, padding is
/// skipped; `to`: of the stored order of `stored` (whose indices do not count; whole: plain row-major order), as long
/// as `from`. Takes no memory, and time in proportion to the number of runs; between two different orders, of which one
/// is cut twice, to the number of strips that they have in the run. Throws InvalidArgument for elements that no part
/// has.
void for_each_run(const std::vector<int64_t>& whole, const Splits& splits, const Range& elements, const Splits& stored,
                  const std::function<void(const Range& from, const Range& to)>& visit);

}  // namespace tesserae::mesh
