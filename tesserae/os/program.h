#pragma once

#include <string>

namespace tesserae::os {

/// The path of the program that this process runs, so that it can start itself again.
std::string program_path();

}  // namespace tesserae::os
