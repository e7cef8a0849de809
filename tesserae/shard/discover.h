#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tesserae/shard/flat.h"
#include "tesserae/shard/unit_handle.h"

namespace torch::nn {
class Module;
}

namespace tesserae::shard {

/// The parameters of one flat buffer to be, in the order of its slots.
struct FlatSpec {
  std::vector<Slot> slots;  ///< names and shapes
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> local = {};  ///< see NamedParameter; empty: none has any
  c10::ScalarType dtype;
  bool trainable;
  CutBy cut_by = CutBy::elements;
};

/// A unit as found in a module tree. Index 0 is the root; parents come before their children.
struct UnitSpec {
  std::string name;  ///< path in the tree; "" for the root
  int parent = -1;
  UnitHandle* handle = nullptr;
  std::vector<FlatSpec> flats;  ///< trainable ones first, then by dtype
};

/// The axes on which the ranks differ that shard a unit's state: those of its parameters (mesh::state_axes), which are
/// alike. Throws InvalidArgument naming two that are not: they cannot be gathered together.
mesh::AxisSet state_axes(const UnitSpec& unit);

/// A parameter with all of its names; the first is the one that counts.
struct NamedParameter {
  std::vector<std::string> names;
  at::Tensor parameter;
  mesh::Splits split = {};          ///< which part of a larger tensor it is
  std::vector<int64_t> whole = {};  ///< shape of that tensor; {}: the parameter is whole
  /// The values of what this rank holds, where `parameter` has none but its shape. By rows only.
  at::Tensor local = {};
  int dim = 0;  ///< Slot::dim
};

/// Sorts a unit's parameters into flat buffers: one for each (requires_grad, dtype), in it matrices before vectors; by
/// rows one for each parameter, in that order. Throws InvalidArgument for a parameter without dimensions by rows.
std::vector<FlatSpec> group_parameters(const std::vector<NamedParameter>& parameters, CutBy cut_by);

/// Finds the units below (and including) `root` and who owns which parameter: the innermost unit around it. A parameter
/// that several modules share (tied weights) is one slot, owned by the innermost unit that encloses all of its users.
/// Modules that are tensor::SplitParameters say which of their parameters are parts of larger tensors.
/// Throws InvalidArgument if the root is no unit, has no parameters, or is part of a sharded model already.
std::vector<UnitSpec> discover_units(torch::nn::Module& root, CutBy cut_by = CutBy::elements);

/// One line per unit and parameter: what ranks must agree on. Which part a rank holds is its own.
std::string describe(const std::vector<UnitSpec>& units);

}  // namespace tesserae::shard
