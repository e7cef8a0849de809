#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "tesserae/context/pattern.h"

namespace tesserae::context::testing {

/// The definition: may the query attend to the key?
inline bool attends(const Pattern& pattern, int64_t query, int64_t key) {
  const auto document = pattern.documents_in({query, query + 1}).at(0);
  if (key < document.begin || key >= document.end) return false;
  if (!pattern.causal()) return true;
  return key <= query && (pattern.window() == 0 || key > query - pattern.window());
}

/// [length, length], true where attended.
inline at::Tensor mask_of(const Pattern& pattern) {
  at::Tensor mask = at::zeros({pattern.length(), pattern.length()}, at::TensorOptions().dtype(at::kBool));
  for (int64_t q = 0; q < pattern.length(); ++q) {
    for (int64_t k = 0; k < pattern.length(); ++k) mask[q][k] = attends(pattern, q, k);
  }
  return mask;
}

/// Of all kinds, for sequences of about `length`.
inline std::vector<Pattern> patterns(int64_t length) {
  std::vector<Pattern> list;
  for (const std::vector<int64_t>& documents :
       {std::vector<int64_t>{}, {0, 1, 2, length / 2}, {0, length - 1}, {0, 3, length / 3, length / 3 + 1}}) {
    list.emplace_back(length, true, 0, documents);
    list.emplace_back(length, false, 0, documents);
    for (const int64_t window : {int64_t{1}, int64_t{2}, int64_t{7}, length - 1, length, 2 * length}) {
      list.emplace_back(length, true, window, documents);
    }
  }
  return list;
}

}  // namespace tesserae::context::testing
