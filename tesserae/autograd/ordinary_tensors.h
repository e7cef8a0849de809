#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace tesserae::autograd {

/// While it lives this thread makes ordinary tensors, also inside the user's inference mode: what the engine makes
/// there outlives it, and is written outside of it. Gradients are as off as they were.
class OrdinaryTensors {
 public:
  OrdinaryTensors() {
    if (!c10::InferenceMode::is_enabled()) return;
    const bool gradients = at::GradMode::is_enabled();
    mode_.emplace(false);
    gradients_.emplace(gradients);
  }

 private:
  std::optional<c10::InferenceMode> mode_;
  std::optional<at::AutoGradMode> gradients_;  // which the mode turns on
};

}  // namespace tesserae::autograd
