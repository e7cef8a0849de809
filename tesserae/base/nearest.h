#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tesserae {

/// How many single characters must be inserted, removed or replaced to turn `a` into `b`.
int edit_distance(std::string_view a, std::string_view b);

/// The entry of `known` closest to `word` by edit_distance (the first of several): for "did you mean" in errors.
/// Empty if `known` is empty.
std::string nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace tesserae
