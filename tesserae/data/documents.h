#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tesserae::data {

/// Where documents lie in a batch of packed ones: samples are cut from the stream without regard for them, so a sample
/// begins in the middle of a document as a rule, and has the ends of several.
struct Documents {
  at::Tensor positions;  ///< int64, as the batch: in its document, or from the sample's beginning if that is later
  at::Tensor starts;     ///< int64 [documents]: where they begin in the batch as one row, ascending; the first is 0
};

/// Of tokens [batch, sequence], int64 on the CPU, with `document_end` after each document. Each row begins one. Throws
/// InvalidArgument for other tensors.
Documents find_documents(const at::Tensor& tokens, int64_t document_end);

}  // namespace tesserae::data
