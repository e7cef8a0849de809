#pragma once

#include <cerrno>
#include <string>
#include <string_view>

#include "tesserae/base/error.h"

namespace tesserae::os {

/// The IoError for a system call that just failed: "[function] subject: what: reason of errno". `subject` is the path,
/// process or name that the call was about.
IoError failure(std::string_view function, std::string_view subject, std::string_view what, int error = errno);

}  // namespace tesserae::os
