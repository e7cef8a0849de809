#pragma once

#include <string>

namespace tesserae::os {

/// Writes all of it to a descriptor, and waits where there is no room. Throws IoError.
void write_all(int descriptor, const std::string& bytes);

}  // namespace tesserae::os
