#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tesserae/optim/target.h"

namespace tesserae::optim {

/// The norm of the whole model's gradient, as one process would see it (parameters that tensor-parallel ranks
/// hold whole count once): the 2-norm, or another p-norm with p > 0
/// (infinity: the largest magnitude). One collective. 0 if there is no gradient. Not finite if a gradient is not, or if
/// a run of 4,096 elements has a norm above 1.8e19. Throws InvalidArgument unless p > 0. `also`, if given and p is
/// finite: replaced by its sums over all ranks, in the same collective.
double global_norm(Target& target, double p = 2, std::vector<double>* also = nullptr);

/// Its 2-norm as a double scalar of the target's device, for which the host does not wait; for targets that have one
/// (Target::device). One collective.
at::Tensor norm_on_device(Target& target);

/// How much gradients of that norm are scaled to have norm `max_norm` at most: 1 if the norm is not finite.
double clip_coefficient(double norm, double max_norm);

/// Scales the gradients to a global norm of `max_norm` at most and returns the norm that they had. A norm that is not
/// finite is returned, and the gradients left alone. One all-reduce. Optimizer::step clips by itself, without this
/// second pass over the gradients.
double clip_gradients(Target& target, double max_norm);

}  // namespace tesserae::optim
