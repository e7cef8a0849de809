#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "tesserae/context/sequence.h"

namespace tesserae::context {

struct AttentionOptions {
  std::optional<double> scale = {};  ///< of the products; 1 / sqrt(width)
  /// Who attends to whom, if it is not what the sequence was cut for: layers of one model may differ in their windows.
  /// Of the sequence's length.
  std::optional<Pattern> pattern = {};
};

/// Scaled dot product attention of this rank's queries to the keys and values of all ranks: queries [batch, heads,
/// tokens, width], keys and values [batch, heads of keys and values, tokens, width] of this rank's positions, in the
/// order of `sequence->positions()`; the output has the queries' shape. Each rank computes its own queries' pairs, and
/// no others. Gradients of keys and values are summed over the ranks. No dropout.
///
/// The parts of the pattern are computed as tiles without masks and joined in fp32. Deterministic: depends on the cut,
/// never on timing. Collective, also for a rank that has no tokens; first derivatives only. Where autocast is on, in
/// its dtype. Throws InvalidArgument for shapes that cannot be; comm::CommError.
at::Tensor attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                     const SequencePtr& sequence, const AttentionOptions& options = {});

}  // namespace tesserae::context
