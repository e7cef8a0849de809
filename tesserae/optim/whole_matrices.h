#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tesserae/comm/group.h"

namespace tesserae::optim {

/// Matrices of which each member of a group holds some rows, brought whole to one member each, and back: for optimizers
/// that work on whole matrices, as Muon does (https://kellerjordan.github.io/posts/muon/).
///
/// Of n members, member k has the rows [k * c, (k + 1) * c) with c = ceil(rows / n), as far as there are any: what
/// torch.chunk gives it, and Shard(0) means. The state of the optimizer stays with the rows, so each member has 1/n of
/// it; what is owned is the work on whole matrices. Owners are chosen by work, m * n * min(m, n) of an m x n matrix:
/// the heaviest first, each to the member that has the least so far; all members choose alike.
///
/// Messages go straight from rows into the whole matrix and back, without buffers between. Matrices and rows are of one
/// dtype and device. One thread; the verbs are collective, and throw what those of Group throw.
class WholeMatrices {
 public:
  struct Shape {
    int64_t rows = 0;
    int64_t columns = 0;
    bool operator==(const Shape&) const = default;
  };

  /// Collective: Mismatch, with both sides, if members bring other shapes. `group` outlives this.
  WholeMatrices(comm::Group& group, std::vector<Shape> shapes);

  /// By matrix: the member that gets it whole.
  const std::vector<int>& owners() const { return owners_; }
  /// What the member with the most work has, by what it would have if work could be shared out evenly: 1 at best.
  double imbalance() const { return imbalance_; }

  /// `rows`: by matrix, those of this member, contiguous [its rows, columns]. Returns, in order, the matrices that this
  /// member owns.
  std::vector<at::Tensor> collect(const std::vector<at::Tensor>& rows) const;
  /// The reverse: `whole` are the matrices that this member owns, contiguous, of the dtype and device of `like`.
  std::vector<at::Tensor> distribute(const std::vector<at::Tensor>& whole, const at::TensorOptions& like) const;

 private:
  struct Rows {
    int64_t begin = 0;
    int64_t count = 0;
  };
  Rows rows_of(size_t matrix, int member) const;
  bool is_mine(size_t matrix) const { return owners_[matrix] == group_.rank(); }
  void check(const char* verb, const at::Tensor& tensor, int64_t rows, size_t matrix,
             const at::TensorOptions& like) const;

  comm::Group& group_;
  std::vector<Shape> shapes_;
  std::vector<int> owners_;
  double imbalance_ = 1.0;
};

}  // namespace tesserae::optim
