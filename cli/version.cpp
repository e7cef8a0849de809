#include "cli/version.h"

#include <torch/version.h>

namespace tesserae::cli {

std::string version_text() {
  return "tesserae " TESSERAE_VERSION " (torch " TORCH_VERSION ")";
}

}  // namespace tesserae::cli
