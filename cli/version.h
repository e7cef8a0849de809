#pragma once

#include <string>

namespace tesserae::cli {

/// "tesserae 0.1.0 (torch 2.13.0)".
std::string version_text();

}  // namespace tesserae::cli
