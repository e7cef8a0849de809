#pragma once

#include <ATen/core/Tensor.h>

#include "tesserae/context/sequence.h"

namespace tesserae::context {

// From some positions of all heads to all positions of some heads, and back (DeepSpeed-Ulysses, Jacobs et al., 2023,
// arXiv:2309.14509). Each is the other's adjoint. Collective; C divides the heads.

/// x [batch, heads, tokens of this rank, width] to [batch, heads / C, length, width]: rank r gets the r-th span of
/// heads.
at::Tensor positions_of_own_heads(const at::Tensor& x, const SequencePtr& sequence);
/// The reverse.
at::Tensor own_positions_of_heads(const at::Tensor& x, const SequencePtr& sequence);

}  // namespace tesserae::context
