#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/autograd/gradient_hooks.h"
#include "tesserae/shard/discover.h"
#include "tesserae/shard/flat.h"
#include "tesserae/shard/flat_gradient.h"
#include "tesserae/shard/flat_parameter.h"
#include "tesserae/shard/shard.h"

namespace tesserae::shard {

class ShardedUnit;

/// One flat buffer of a unit on this rank: its description, its parameters and, unless they are frozen, its gradients
/// and the shard that an optimizer sees. Keeps its address as long as the unit lives, also in a change of degrees.
class FlatBuffer {
 public:
  /// Cuts what this rank holds out of the parameters' initial values, one parameter at a time, and makes the parameters
  /// views of the gathered buffer. Collective where initial values are broadcast.
  FlatBuffer(ShardedUnit& unit, const FlatSpec& spec);
  FlatBuffer(const FlatBuffer&) = delete;
  FlatBuffer& operator=(const FlatBuffer&) = delete;

  ShardedUnit& unit() const { return unit_; }
  const Flat& flat() const { return *flat_; }
  FlatParameter& parameter() const { return *parameter_; }
  FlatGradient* gradient() const { return gradient_.get(); }  ///< null if frozen
  Shard* shard() { return gradient_ ? &shard_ : nullptr; }    ///< null if frozen
  const Shard* shard() const { return gradient_ ? &shard_ : nullptr; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }  ///< the module's parameters, by slot

  /// The unit has become part of a larger model.
  void rename(const std::string& prefix);
  /// See ShardedUnit::set_master_dtype.
  void set_master_dtype(c10::ScalarType dtype);
  /// Frozen at set-up, and one of its parameters has requires_grad now.
  bool is_thawing() const;
  /// Throws InvalidArgument naming the parameter if it is not by rows, in a buffer of its own, or would have to lie
  /// elsewhere.
  void require_can_thaw() const;
  /// Makes it trainable, between steps; its shard has no index yet.
  void thaw();

  /// See FlatParameter::extend; it stays in changes of degrees.
  void extend(std::shared_ptr<GatherExtension> extension);

  /// What this rank holds of a buffer between steps; what a change of degrees makes anew.
  struct State {
    std::unique_ptr<Flat> flat;
    at::Tensor master;
    at::Tensor piece;   ///< as FlatParameter takes it
    at::Tensor shared;  ///< FlatParameter::shared_memory of the new layout
    at::Tensor grad;    ///< undefined: no gradient
  };
  /// Puts `state`, cut for the unit's Sharding, in place of the present state. The module's parameters stay.
  void replace(State state);
  /// Takes the room on a disk that its gradient will need: before a step, not found missing in it. Throws IoError.
  void take_room();

 private:
  Shard shard_of(const at::Tensor& master) const;
  void take_gradients();

  ShardedUnit& unit_;
  std::unique_ptr<Flat> flat_;
  std::vector<at::Tensor> tensors_;
  Shard shard_;
  std::unique_ptr<FlatParameter> parameter_;
  std::shared_ptr<GatherExtension> extension_;
  std::unique_ptr<FlatGradient> gradient_;
  std::unique_ptr<autograd::GradientHooks> hooks_;
};

}  // namespace tesserae::shard
