#pragma once

#include <string>

namespace tesserae::train {

/// Makes the folder of a run and returns its path: `wanted` if it is missing or empty, else the first of wanted-2,
/// wanted-3, ... that is, so that no run overwrites another. Parents are made too. Throws IoError.
std::string make_run_folder(const std::string& wanted);

}  // namespace tesserae::train
