#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tesserae/mesh/split.h"

namespace torch::nn {
class Module;
}

namespace tesserae::tensor {

/// A parameter that is this rank's part of a larger tensor.
struct SplitParameter {
  std::string name;  ///< in the module that declares it, without a path: "weight"
  mesh::Splits split;
  std::vector<int64_t> whole;  ///< shape of the whole tensor
};

/// A module some of whose own parameters are parts derives from this besides torch::nn::Module (tensor/layers.h). What
/// walks a module tree asks for it: discover_units, and those that fill parameters.
class SplitParameters {
 public:
  virtual ~SplitParameters() = default;
  /// Those of the module itself, not of its children. Parameters that are not named are whole.
  virtual std::vector<SplitParameter> split_parameters() const = 0;
};

/// The part of `whole` that `splits` mean, contiguous, padding zero. Throws InvalidArgument where they cannot cut it.
at::Tensor part_of(const at::Tensor& whole, const mesh::Splits& splits);

/// Gives every parameter of `root` values: `fill` gets its name and the whole tensor, of which a split parameter keeps
/// its part. Tied parameters are filled once, under their first name.
void fill_parameters(torch::nn::Module& root,
                     const std::function<void(const std::string& name, at::Tensor& parameter)>& fill);

}  // namespace tesserae::tensor
