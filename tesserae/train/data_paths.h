#pragma once

#include <string>
#include <vector>

namespace tesserae::train {

/// data.path as files and folders that exist: "python:stdlib" becomes the modules of the standard library of python3
/// ($TESSERAE_PYTHON names another), without its own tests and without installed packages.
/// Throws config::ConfigError naming the key for a path that is missing, and for python:stdlib where there is no
/// Python.
std::vector<std::string> resolve_data_paths(const std::vector<std::string>& paths);

}  // namespace tesserae::train
