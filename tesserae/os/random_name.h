#pragma once

#include <string>

namespace tesserae::os {

/// A name that nobody else has: 16 hexadecimal digits from the system's randomness.
std::string random_name();

}  // namespace tesserae::os
