#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/shard/unit.h"

namespace tesserae::shard {

/// Which children of a container become units. `index` is the child's position, `module` the child.
using WrapPolicy = std::function<bool(size_t index, const torch::nn::Module& module)>;

/// Children of one of these types: wrap_types<Block, AttentionImpl>() (module or holder types).
template <class... Types>
WrapPolicy wrap_types() {
  return [](size_t, const torch::nn::Module& module) {
    return ((dynamic_cast<const typename ModuleOf<Types>::type*>(&module) != nullptr) || ...);
  };
}

/// Children with at least `parameters` elements in their parameters.
WrapPolicy wrap_larger_than(int64_t parameters);

/// Any module with a forward from one tensor to one tensor, as a unit. Its parameters keep their names: the module's
/// own parameters and children are this module's.
class AnyUnitImpl : public torch::nn::Module {
 public:
  explicit AnyUnitImpl(torch::nn::AnyModule module);
  /// The module's own.
  at::Tensor forward(const at::Tensor& input) { return module_.forward(input); }
  void train(bool on = true) override;

 private:
  torch::nn::AnyModule module_;
};

/// The root of a model that is a chain of modules, with the children that the policy chooses as units of their own.
/// forward is torch::nn::Sequential's for one tensor in and one tensor out. Children are numbered as in `sequential`.
class SequentialUnitsImpl : public torch::nn::Module {
 public:
  SequentialUnitsImpl(const torch::nn::Sequential& sequential, const WrapPolicy& policy);
  /// All children in their order, each on what the one before returned.
  at::Tensor forward(const at::Tensor& input);

 private:
  std::vector<std::function<at::Tensor(const at::Tensor&)>> chain_;
};
/// The holder of it, which shard_model() takes.
using SequentialUnits = Unit<SequentialUnitsImpl>;

}  // namespace tesserae::shard
