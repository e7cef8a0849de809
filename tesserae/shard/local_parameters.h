#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tesserae/shard/flat.h"
#include "tesserae/shard/flat_gradient.h"
#include "tesserae/shard/flat_parameter.h"
#include "tesserae/shard/user_tensor.h"

namespace tesserae::shard {

/// Tensors of the user, one or several to a flat buffer, that show what this rank holds of it between steps, so that
/// any optimizer made for plain parameters can update a shard: the values are slices of the master, and
/// `.grad` of each is the slice of Shard::grad. Both are flat, but for two kinds: what is cut by rows has the
/// parameter's dimensions, and a tensor that keeps its shape (UserTensor::keeps_shape) has all of it.
///
/// The user owns the tensors and does with `.grad` whatever they like. How that meets the engine:
///  1. take_gradients(), before a reduction adds to Shard::grad: a `.grad` that was set to nothing counts as zero, one
///     that was replaced by another tensor, or whose data were, is copied. Nothing anywhere: Shard::grad is undefined,
///     as after zero_grad.
///  2. hide_gradients(), during a backward that reduces: what autograd finds for the tensors themselves (a penalty on
///     them) comes to a `.grad` of its own, beside what lanes add up.
///  3. show_gradients(), when the reduction is done: that is added, and `.grad` of each tensor is its slice again.
///     Without a reduction since 1 what was set to nothing stays so.
/// Tensors that have requires_grad switched off have no gradient, nor have those without an element on this rank,
/// unless they are cut by rows: DTensors have it on all ranks or on none.
///
/// Used from the thread that computes; never waits.
class LocalParameters {
 public:
  /// `parameters`: one for each slot of `flat`, or a single one for all that this rank holds, padding included.
  LocalParameters(const Flat& flat, FlatParameter& values, FlatGradient* gradients, const UserTensors& parameters);

  /// Takes the values of tensors that were given other memory of the same size, and has them show
  /// FlatParameter::local() again. Throws InvalidArgument naming a parameter whose size or dtype has changed, or that
  /// has no values yet.
  void take_values();
  /// The tensors show FlatParameter::local().
  void show_values();

  /// `tensors`, one for each slot, require a gradient as the user's do; those of which the user's do not stay as they
  /// are unless `freezes`.
  void show_requires_grad(const std::vector<at::Tensor>& tensors, bool freezes) const;

  /// True if a tensor with elements on this rank has a `.grad`.
  bool any_gradient() const;
  void take_gradients(Shard& shard);
  void hide_gradients();
  /// A reduction begins: all of its tensors have a gradient afterwards.
  void expect_reduction();
  void show_gradients(Shard& shard);

  /// Some state that an optimizer keeps for each tensor, joined to what FlatParameter::whole_values takes:
  /// slices[i] belongs to parameters[i] and has as many elements (undefined: zeros).
  at::Tensor join(const std::vector<at::Tensor>& slices, c10::ScalarType dtype) const;
  /// The reverse: views of `local`, one for each of the user's tensors, perhaps without an element.
  std::vector<at::Tensor> split(const at::Tensor& local) const;

 private:
  struct Entry {
    std::shared_ptr<UserTensor> parameter;
    mesh::Range range;            ///< in FlatParameter::local()
    const Slot* shape = nullptr;  ///< which shape it has; null: it is flat
    bool none = false;            ///< its gradient was taken, and was set to nothing
  };
  bool has_gradient(const Entry& entry) const;
  void let_go_of_kept();
  void add_given(Shard& shard);
  static at::Tensor elements_in(const at::Tensor& users, const Entry& entry);
  static at::Tensor part_of(const at::Tensor& local, const Entry& entry);

  const Flat& flat_;
  FlatParameter& values_;
  FlatGradient* gradients_;  // null if frozen
  std::vector<Entry> entries_;
  std::vector<at::Tensor> views_;  // slices of shown_, made once since Shard::grad keeps its memory
  at::Tensor shown_;
  bool hidden_ = false;
};

}  // namespace tesserae::shard
