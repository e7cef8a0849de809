#include "tesserae/data/documents.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::data {

Documents find_documents(const at::Tensor& tokens, int64_t document_end) {
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong || !tokens.is_cpu()) {
    throw InvalidArgument("find_documents",
                          cat("tokens of shape ", tokens.sizes(), " and type ", c10::toString(tokens.scalar_type()),
                              " on ", tokens.device().str(), "; they must be [batch, sequence] int64 on the CPU"));
  }
  const at::Tensor rows = tokens.contiguous();
  const int64_t* const token = rows.const_data_ptr<int64_t>();
  const int64_t length = rows.size(1);
  Documents found{at::empty_like(rows), {}};
  auto* const position = found.positions.mutable_data_ptr<int64_t>();
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const bool begins = i % length == 0 || token[i - 1] == document_end;
    if (begins) starts.push_back(i);
    position[i] = i - starts.back();
  }
  found.starts = at::empty({static_cast<int64_t>(starts.size())}, at::kLong);
  std::copy(starts.begin(), starts.end(), found.starts.mutable_data_ptr<int64_t>());
  return found;
}

}  // namespace tesserae::data
