#include "tesserae/mesh/axes.h"

#include <algorithm>
#include <string>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

// The divisors of `ranks` next to `degree`, below and above it.
std::string nearest_degrees(int ranks, int degree) {
  int below = 0, above = 0;
  for (int divisor = 1; divisor <= ranks; ++divisor) {
    if (ranks % divisor != 0) continue;
    if (divisor < degree) below = divisor;
    if (divisor > degree && above == 0) above = divisor;
  }
  return below == 0 ? cat(above) : above == 0 ? cat(below) : cat(below, " and ", above);
}

}  // namespace

Axes::Axes(int ranks, int tensor_degree) : ranks_(ranks), tensor_degree_(tensor_degree) {
  if (ranks < 1) throw InvalidArgument("Axes", cat("a job of ", ranks, " ranks has no axes"));
  if (tensor_degree >= 1 && ranks % tensor_degree == 0) return;
  throw InvalidArgument("Axes", cat("a tensor-parallel degree of ", tensor_degree, " does not divide the ", ranks,
                                    " ranks of the job; nearest valid: ", nearest_degrees(ranks, tensor_degree)));
}

std::vector<int> Axes::tensor_group(int rank) const {
  std::vector<int> group;
  for (int index = 0; index < tensor_degree_; ++index) group.push_back(rank - tensor_index(rank) + index);
  return group;
}

std::vector<int> Axes::data_group(int rank) const {
  std::vector<int> group;
  for (int member = tensor_index(rank); member < ranks_; member += tensor_degree_) group.push_back(member);
  return group;
}

}  // namespace tesserae::mesh
