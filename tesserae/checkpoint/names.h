#pragma once

#include <string>
#include <string_view>

namespace tesserae::checkpoint {

/// Why a tensor cannot have that name in a file; empty: it can. A name is a path that stays below where it starts: not
/// empty, no control characters, no leading slash, no component "..".
std::string tensor_name_defect(std::string_view name);

/// Why a data file cannot have that name; empty: it can. One component of letters, digits, '.', '_' and '-' that does
/// not begin with a dot.
std::string file_name_defect(std::string_view name);

}  // namespace tesserae::checkpoint
