#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/experts/moe.h"
#include "tesserae/optim/optimizer.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/shard/unit.h"
#include "tesserae/tensor/layers.h"

namespace tesserae::shard {
struct Slot;
}

namespace tesserae::testing {

/// A small transformer without attention: what there is around a mixture of experts in a model.
struct MoeNetOptions {
  int64_t vocabulary = 19;
  int64_t width = 16;
  int64_t hidden = 12;  ///< of an expert
  int64_t experts = 8;
  int blocks = 2;
  experts::RoutingOptions routing{.chosen = 2, .balance_loss = 0.01, .z_loss = 0.001};
  int64_t shared_hidden = 0;
  double capacity_factor = 0;
  bool sequence = false;
  bool checkpoint = false;      ///< blocks recompute their activations
  bool frozen_experts = false;  ///< those of the first block
  c10::ScalarType dtype = at::kFloat;
};

class MoeBlockImpl : public torch::nn::Module {
 public:
  MoeBlockImpl(const MoeNetOptions& options, const tensor::LayerOptions& layer);
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x);

  tensor::RmsNorm norm{nullptr}, moe_norm{nullptr};
  tensor::Mlp dense{nullptr};
  experts::Moe moe{nullptr};
};

class MoeNetImpl : public torch::nn::Module {
 public:
  MoeNetImpl(const MoeNetOptions& options, const tensor::ParallelPtr& parallel);
  /// The mean cross entropy of the next tokens of `tokens` [batch, time + 1], and the losses of the routers.
  at::Tensor forward(const at::Tensor& tokens);

  MoeNetOptions options;
  tensor::LayerOptions layer;
  tensor::VocabularyEmbedding embedding{nullptr};
  std::vector<shard::Unit<MoeBlockImpl>> blocks;
  tensor::RmsNorm norm{nullptr};
  tensor::ColumnLinear head{nullptr};
};
using MoeNet = shard::Unit<MoeNetImpl>;

/// One rank of a job that trains it.
struct MoeJob {
  mesh::AxisDegrees axes = {};
  mesh::Strategy strategy = {};
  MoeNetOptions net = {};
  int accumulation = 0;  ///< 0: one backward a step; 1: two, Accumulation::local; 2: two, Accumulation::two_hop
  bool clip = false;
  bool adamw = false;
  bool sync = false;  ///< initial values are rank 0's, the others have made something else of theirs
  bool bf16 = false;
  bool rows = false;  ///< CutBy::rows
};

class MoeRank {
 public:
  MoeRank(const std::shared_ptr<comm::Fabric>& job, const MoeJob& options);

  struct Step {
    double loss = 0, norm = 0;
    std::map<std::string, at::Tensor> gradients;  ///< whole; if asked for
  };
  /// Trains on this rank's part of the global batch of step `step`.
  Step step(int step, bool with_gradients = false);
  std::map<std::string, at::Tensor> parameters();  ///< whole

  comm::MeshFabric& mesh() { return *mesh_; }
  shard::Sharded& sharded() { return sharded_; }
  optim::Optimizer& optimizer() { return *optimizer_; }
  MoeNet& net() { return net_; }

 private:
  shard::Options options() const;
  at::Tensor whole_of(const shard::Slot& slot, const at::Tensor& flat);

  MoeJob job_;
  std::shared_ptr<comm::MeshFabric> mesh_;
  std::shared_ptr<tensor::Parallel> parallel_;
  MoeNet net_;
  shard::Sharded sharded_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

/// The worst of max |a - b| / max |b| over the tensors of `expected`; 1e9 if one is missing or not finite.
double worst_of(const std::map<std::string, at::Tensor>& actual, const std::map<std::string, at::Tensor>& expected);

}  // namespace tesserae::testing
