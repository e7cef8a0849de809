#pragma once

#include <string>
#include <vector>

#include "tesserae/mesh/split.h"

namespace tesserae::mesh {

/// How far a job is cut along each axis; the data axis takes what is left.
struct AxisDegrees {
  int tensor = 1;   ///< T
  int context = 1;  ///< C
  int expert = 1;   ///< E

  bool operator==(const AxisDegrees&) const = default;
};

/// The ranks of a job as a grid of named axes. A value: arithmetic only, the same on every rank.
///
/// Tensor ranks are innermost, so that they are neighbours on a host; then context, then data:
///   rank = t + T * s,  s = c + C * d,  with t < T, c < C, d < D = ranks / (T * C).
/// The N = C * D ranks of one tensor index shard the training state (Layout). What belongs to experts is cut a second
/// way, s = e + E * x with e < E, x < N / E: the N / E ranks of one expert index shard the state of its experts.
///
/// Every question is asked for a set of axes: their degree is the product, `index` counts innermost first, and the
/// members are the ranks that differ on no other axis, by index (and so ascending). mesh::axes names the sets that
/// matter: `mesh.members(axes::state, rank)` shard the state with `rank`.
class Mesh {
 public:
  /// Throws InvalidArgument, naming the nearest degrees that would do, unless T divides the ranks, C the ranks of one
  /// tensor index, and E the N ranks that shard state.
  explicit Mesh(int ranks, const AxisDegrees& degrees = {});

  int ranks() const { return ranks_; }
  const AxisDegrees& degrees() const { return degrees_; }

  int degree(AxisSet axes) const;
  /// In [0, degree(axes)). Throws InvalidArgument, as the others do, for a rank that the job does not have.
  int index(AxisSet axes, int rank) const;
  /// `rank` is members[index(axes, rank)].
  std::vector<int> members(AxisSet axes, int rank) const;

  /// Of the ranks that hold copies along these axes, the one that speaks for them.
  bool is_first(AxisSet axes, int rank) const { return index(axes, rank) == 0; }
  /// What no split cuts is the same on all ranks of a tensor group, and one of them counts, sends or writes it.
  bool writes_unsplit(int rank) const { return is_first(axes::tensor, rank); }

  /// The part that `rank` holds of a tensor that is split over these axes, whatever the indices in `splits` say.
  Splits part(const Splits& splits, int rank) const;

  bool operator==(const Mesh&) const = default;

 private:
  struct Stride {
    int degree, stride;
  };
  Stride stride(Axis axis) const;

  int ranks_;
  AxisDegrees degrees_;
};

/// "8 ranks = tensor 2 x context 2 x data 2"; with experts, " = tensor 2 x expert 4 x expert_data 1" behind it. Inner
/// axes of degree 1 are left out.
std::string to_string(const Mesh& mesh);

}  // namespace tesserae::mesh
