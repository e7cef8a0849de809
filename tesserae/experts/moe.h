#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "tesserae/experts/balance.h"
#include "tesserae/experts/experts.h"
#include "tesserae/experts/routing.h"
#include "tesserae/shard/unit.h"
#include "tesserae/tensor/mlp.h"

namespace tesserae::experts {

struct MoeOptions {
  RoutingOptions routing;
  int64_t hidden = 0;          ///< of each expert
  int64_t shared_hidden = 0;   ///< > 0: of a SwiGLU that every token goes through, beside its experts (DeepSeekMoE,
                               ///< arXiv:2401.06066): shared experts side by side
  double capacity_factor = 0;  ///< > 0: choices beyond it are dropped; see plan_dispatch
};

/// A mixture of experts in the place of an Mlp (Shazeer et al., 2017, arXiv:1701.06538): every token goes through the k
/// experts that its router chooses, wherever on the expert axis they are, and gets the weighted sum of what they make
/// of it. The mesh of `parallel` says who has which experts; numbers do not depend on its degrees.
///
/// Parameters: router.weight, experts.{gate,up,down} and, if shared, shared.{gate,up,down}.weight. The experts are a
/// unit inside the unit that this layer belongs to. Used by all ranks alike, from the thread that computes, also by
/// those whose batch is empty: forward and backward are collective.
///
/// With tensor parallelism all ranks of a group route the same tokens to the same experts and work on their part of the
/// hidden layer; one sum over them in forward and one in backward, and one of the weights' gradients [tokens, k].
class MoeImpl : public torch::nn::Module {
 public:
  /// Throws InvalidArgument as Router, Experts and Mlp do.
  MoeImpl(const MoeOptions& options, const tensor::LayerOptions& layer);

  /// y for x [..., width], both repeated or, sequence-parallel, split (LayerOptions); and the losses of the router
  /// times their coefficients, a scalar to be added to the loss of the model (0 outside training, see Routing::loss).
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x);

  /// Of the last forward (no recomputation), as far as this rank's tokens go; over_ranks() adds up.
  const Load& load() const { return load_; }
  RouterImpl& router() const { return *router_.ptr(); }

 private:
  MoeOptions options_;
  tensor::LayerOptions layer_;
  Router router_{nullptr};
  shard::Unit<Experts> experts_{nullptr};
  tensor::Mlp shared_{nullptr};  // if there is one
  Load load_;
};
TORCH_MODULE(Moe);

}  // namespace tesserae::experts
