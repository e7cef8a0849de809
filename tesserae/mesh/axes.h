#pragma once

#include <vector>

#include "tesserae/mesh/world.h"

namespace tesserae::mesh {

/// The two axes of a job. Tensor-parallel ranks are innermost, so that they are neighbours on a host: job rank r has
/// tensor index r mod T and data-parallel rank r / T, for a tensor-parallel degree T. The N = ranks / T data-parallel
/// ranks of one tensor index shard their training state by P, G and O (Layout); the T ranks of one data-parallel rank
/// hold the parts of every tensor that is split (Split). A value: arithmetic only.
class Axes {
 public:
  /// Throws InvalidArgument, naming the nearest degrees that would do, unless tensor_degree divides ranks.
  Axes(int ranks, int tensor_degree);

  int ranks() const { return ranks_; }
  int tensor_degree() const { return tensor_degree_; }
  int data_ranks() const { return ranks_ / tensor_degree_; }  ///< N

  int tensor_index(int rank) const { return rank % tensor_degree_; }
  int data_rank(int rank) const { return rank / tensor_degree_; }

  /// The T job ranks that share the data-parallel rank of `rank`, by tensor index.
  std::vector<int> tensor_group(int rank) const;
  /// The N job ranks that share the tensor index of `rank`, by data-parallel rank.
  std::vector<int> data_group(int rank) const;

  bool operator==(const Axes&) const = default;

 private:
  int ranks_;
  int tensor_degree_;
};

}  // namespace tesserae::mesh
