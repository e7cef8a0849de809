#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "tesserae/base/error.h"

namespace tesserae::offload {

/// Which version of its values a tensor had when autograd saved it. torch compares that by itself only where no hook
/// takes the tensor: what was changed in place since would give a wrong gradient without a word. Holds no memory of the
/// tensor.
class SavedVersion {
 public:
  SavedVersion() = default;
  explicit SavedVersion(const at::Tensor& tensor) : counter_(tensor.unsafeGetTensorImpl()->version_counter()) {
    if (counter_.enabled()) version_ = counter_.current_version();
  }

  /// Throws InvalidArgument if the tensor, or what shares its storage, was changed in place. `like`: its sizes and
  /// dtype, for the message.
  void require_unchanged(const at::Tensor& like) const {
    if (!counter_.enabled() || counter_.current_version() == version_) return;  // those of inference mode have none
    throw InvalidArgument(
        "backward", cat("a tensor of ", like.sizes(), " in ", c10::toString(like.scalar_type()),
                        " that autograd had saved for this backward was changed in place since (version ", version_,
                        ", now ", counter_.current_version(), "): use an operation that makes a new tensor"));
  }

 private:
  c10::VariableVersion counter_;
  uint32_t version_ = 0;
};

}  // namespace tesserae::offload
