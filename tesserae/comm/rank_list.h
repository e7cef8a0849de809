#pragma once

#include <string>
#include <vector>

namespace tesserae::comm {

/// "rank 3", "ranks 1, 3": for people.
inline std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

}  // namespace tesserae::comm
