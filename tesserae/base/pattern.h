#pragma once

#include <string_view>

namespace tesserae {

/// Whether `name` is what `pattern` stands for, in which each `*` is any text, also none.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace tesserae
