#include "tesserae/base/error.h"

namespace tesserae {

Error::Error(std::string_view function, const std::string& message)
    : std::runtime_error(cat("[", function, "] ", message)) {}

}  // namespace tesserae
