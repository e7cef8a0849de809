#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tesserae/comm/mesh_fabric.h"

namespace tesserae::experts {

/// Where the rows of this rank's tokens go, one for each of their choices, and which rows come here: what the two
/// functions below need. Immutable. Expert i of `experts` is on the rank with index i / (experts / E) of the expert
/// axis (GShard: Lepikhin et al., 2020, arXiv:2006.16668). Nothing is padded; without a capacity nothing is dropped.
struct Dispatch {
  int64_t tokens = 0;
  int64_t chosen = 0;         ///< k
  int64_t dropped = 0;        ///< choices beyond the capacity of their expert: they add nothing to their token
  std::vector<int64_t> load;  ///< by expert, of all: how often this rank's tokens chose it
  at::Tensor choices;   ///< [sent]: which of the flattened choices [tokens * k] each row is; by expert, then token
  at::Tensor token_of;  ///< [sent]: of which token
  at::Tensor row_of;    ///< [k, tokens]: the row of each choice, -1 if it is dropped
  std::vector<int64_t> sent, received;  ///< rows to and from each rank of the expert axis
  /// [experts of this rank] int64, on the host: how many rows each has. Rows that have come are ordered by expert, then
  /// by the rank that they come from.
  at::Tensor counts;
  at::Tensor by_expert, by_rank;  ///< that order as rows in order of arrival, and the inverse; undefined: they are one
  comm::Group* group = nullptr;   ///< of the expert axis, on the control lane

  /// Rows that leave this rank in a forward, on the way to experts of other ranks and back to tokens of other ranks.
  int64_t moved() const;
};

/// `choice` [tokens, k] int64: distinct experts in [0, experts) for each token, k in any order; `chosen`: how often
/// each was, [experts] int64. With `capacity_factor` > 0 an expert takes at most ceil(capacity_factor * choices of all
/// ranks / experts), the first in the order of ranks (of axes::loss), tokens and k.
///
/// Collective over the expert axis, and over axes::loss if there is a capacity; so are the functions below, forward and
/// backward, over the expert axis. Like the functions of tesserae/tensor (see Note: order of collectives in
/// tensor/parallel.h) they use the groups of the control lane, from the thread that computes: all ranks make the same
/// calls in the same order, also those without a token. Errors: InvalidArgument unless E divides the experts;
/// comm::CommError.
std::shared_ptr<const Dispatch> plan_dispatch(const at::Tensor& choice, const at::Tensor& chosen,
                                              double capacity_factor, comm::MeshFabric& mesh);

/// The rows [sum of counts, width] that this rank's experts work on, for x [tokens, width]. First derivatives only.
at::Tensor dispatch(const at::Tensor& x, const std::shared_ptr<const Dispatch>& plan);

/// The reverse: brings what experts made of the rows back to their tokens, and adds up what each token gets, times its
/// `weights` [tokens, k], in the order of its choices (in fp32 at least): [tokens, width]. First derivatives only.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const std::shared_ptr<const Dispatch>& plan);

/// experts / E. Throws InvalidArgument, naming the degrees that would do, unless E divides them.
int64_t experts_of_rank(int64_t experts, int degree);

}  // namespace tesserae::experts
