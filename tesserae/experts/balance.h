#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

#include "tesserae/comm/mesh_fabric.h"

namespace tesserae::experts {

/// How the tokens of a forward were spread over the experts.
struct Load {
  std::vector<int64_t> tokens;  ///< by expert: choices of it, those beyond its capacity included
  int64_t dropped = 0;          ///< choices beyond the capacity of their expert
  uint64_t bytes = 0;           ///< that left for experts of other ranks and back; a backward moves as many again

  /// The most of an expert over the mean of all; 1: all have as many. 0 without tokens.
  double imbalance() const;
};

/// The sum over the ranks that read different tokens (axes::loss). Collective over them, on the control lane.
Load over_ranks(const Load& load, comm::MeshFabric& mesh);

/// Moves the bias of every router below `root` that has one by its bias_rate: up where an expert was chosen less often
/// than the mean of its layer since the last call, down where more often (Wang et al., 2024, arXiv:2408.15664). Once a
/// step, between steps, by all ranks: one sum of all counts over axes::loss, none without biases. StepLoads
/// (step_loads.h) does it without a sum of its own.
void update_biases(torch::nn::Module& root);

}  // namespace tesserae::experts
