#include "tesserae/os/failure.h"

#include <system_error>

namespace tesserae::os {

IoError failure(std::string_view function, std::string_view subject, std::string_view what, int error) {
  return IoError(function, cat(subject, ": ", what, ": ", std::generic_category().message(error)));
}

}  // namespace tesserae::os
