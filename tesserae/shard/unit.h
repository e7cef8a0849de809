#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "tesserae/autograd/recompute.h"
#include "tesserae/autograd/tensors.h"
#include "tesserae/base/error.h"
#include "tesserae/shard/unit_handle.h"

namespace tesserae::shard {

/// The side of a unit that its module knows: which sharded unit it is. A module that is a unit derives
/// from this (Unit<M> arranges it); until the model is sharded, a unit is a plain module.
class UnitBase : public UnitHandle {
 public:
  UnitBase() = default;
  /// Of a sharded module a copy knows no engine, and shares its parameters, which hold memory in its steps alone.
  UnitBase(const UnitBase& other) : UnitHandle(other), recompute_(other.recompute_) {}
  UnitBase& operator=(const UnitBase&) = delete;
  /// Recomputes this unit's activations in backward instead of keeping them. May be switched between steps. A forward
  /// whose arguments cannot be copied, or whose tensors for_each_tensor() does not find, throws InvalidArgument then.
  void checkpoint_activations(bool on = true) { recompute_ = on; }

 protected:
  // The events of a unit, in the order of a step; see engine.cpp.
  void before_forward();                         ///< the first: gathers parameters
  void after_forward();                          ///< the last of a forward that has ended
  void cancel_forward();                         ///< in its place after an exception
  at::Tensor on_input(const at::Tensor& input);  ///< casts, and watches for the end of the unit's backward
  void on_output(const at::Tensor& output);      ///< watches for the beginning of the unit's backward
  void zero_gradients();                         ///< the shards' as well: the module's parameters hold none
  /// Before the module moves or converts its parameters: throws InvalidArgument if it would, since the engine's are
  /// views of buffers in one dtype on one device.
  void before_move(const torch::nn::Module& module, std::optional<c10::Device> device,
                   std::optional<c10::ScalarType> dtype) const;

  /// A forward of `unit` (null: nothing to tell), which is cancelled unless end() is called.
  class Forward {
   public:
    explicit Forward(UnitBase* unit) : unit_(unit) {
      if (unit_ != nullptr) unit_->before_forward();
    }
    ~Forward() {
      if (unit_ != nullptr) unit_->cancel_forward();
    }
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;
    /// The forward has ended well: tells the unit, once.
    void end() {
      if (UnitBase* const unit = std::exchange(unit_, nullptr)) unit->after_forward();
    }

   private:
    UnitBase* unit_;
  };

  /// Whether the model has been sharded: without that nothing is told.
  bool sharded() const { return unit_ != nullptr; }
  bool recompute_ = false;

 private:
  void set_unit(ShardedUnit* unit) override { unit_ = unit; }
  bool has_unit() const override { return sharded(); }

  ShardedUnit* unit_ = nullptr;
};

/// M with the engine's steps around its forward. Names of parameters and submodules are M's own.
template <class M>
class UnitImpl : public M, public UnitBase {
 public:
  using M::M;

  /// M's forward, with parameters gathered before it and freed after it as the strategy says.
  template <class... Args>
  auto forward(Args&&... args) {
    auto compute = [this](auto&&... inputs) { return M::forward(std::forward<decltype(inputs)>(inputs)...); };
    if (!sharded() && !recompute_) return compute(std::forward<Args>(args)...);

    using Output = decltype(compute(std::forward<Args>(args)...));
    Forward scope(sharded() ? this : nullptr);
    constexpr bool copies = copies_arguments<Args...>();
    const auto run = [&]() -> Output {
      if (!recompute_ || !at::GradMode::is_enabled())
        return compute(this->template watch<copies>(std::forward<Args>(args))...);
      if constexpr (autograd::can_recompute<Output, Args...>) {
        return autograd::recompute_in_backward(compute, this->template watch<copies>(std::forward<Args>(args))...);
      } else {
        throw InvalidArgument("forward",
                              "what this unit takes cannot be copied, or for_each_tensor() is not overloaded for what "
                              "it returns, so that it cannot be run again: switch checkpoint_activations() off");
      }
    };
    Output output = run();
    scope.end();
    if (sharded()) {
      using autograd::for_each_tensor;  // beside overloads for the user's own types
      for_each_tensor(output, [this](const at::Tensor& tensor) { on_output(tensor); });
    }
    return output;
  }

  /// As Sharded::zero_grad does for the whole model: of this module and all within it.
  void zero_grad(bool set_to_none = true) override {
    M::zero_grad(set_to_none);
    if (sharded()) zero_gradients();
  }

  /// Once sharded, parameters stay where they are and what they are: InvalidArgument for another device or dtype.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    if (sharded()) before_move(*this, device, dtype);
    M::to(device, dtype, non_blocking);
  }
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    if (sharded()) before_move(*this, std::nullopt, dtype);
    M::to(dtype, non_blocking);
  }
  void to(torch::Device device, bool non_blocking = false) override {
    if (sharded()) before_move(*this, device, std::nullopt);
    M::to(device, non_blocking);
  }

 private:
  template <class T>
  static constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, at::Tensor>;

  /// Whether M's forward takes copies of values that hold tensors: one that writes to what it is given does not.
  template <class... Args>
  static constexpr bool copies_arguments() {
    if constexpr (((autograd::may_have_tensors<Args> && !is_tensor<Args>) || ...)) {
      return requires(M & module, const std::decay_t<Args>&... values) {
        module.M::forward(values...);
      };
    } else {
      return false;
    }
  }

  template <bool copies, class T>
  decltype(auto) watch(T&& argument) {
    if constexpr (is_tensor<T>) {
      return sharded() ? on_input(argument) : at::Tensor(argument);
    } else if constexpr (copies && autograd::may_have_tensors<T>) {
      std::decay_t<T> copy(std::forward<T>(argument));
      if (sharded()) {
        autograd::change_tensors(
            copy, [this](const at::Tensor& tensor) { return tensor.defined() ? on_input(tensor) : tensor; });
      }
      return copy;
    } else {
      return std::forward<T>(argument);
    }
  }
};

/// The module type of a module type or of its holder.
template <class T, class = void>
struct ModuleOf {
  using type = T;  ///< T is a module
};
/// Of a holder: what it holds.
template <class T>
struct ModuleOf<T, std::void_t<typename T::ContainedType>> {
  using type = typename T::ContainedType;  ///< T is a holder
};

/// A module whose parameters are gathered and freed together, as a libtorch module holder: Unit<BlockImpl> or
/// Unit<Block>.
///
///   tesserae::Unit<Block> block(config);   // constructor arguments of BlockImpl
///   auto y = block(x);                     // or block->forward(x): runs the engine's steps
template <class T>
class Unit : public torch::nn::ModuleHolder<UnitImpl<typename ModuleOf<T>::type>> {
 public:
  using torch::nn::ModuleHolder<UnitImpl<typename ModuleOf<T>::type>>::ModuleHolder;

  /// Runs forward. (The holder's own call operator does not see a forward that is a template.)
  template <class... Args>
  auto operator()(Args&&... args) {
    return (*this)->forward(std::forward<Args>(args)...);
  }
};

}  // namespace tesserae::shard
