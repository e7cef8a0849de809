#include "cli/numbers.h"

#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::cli {
namespace {

/// The finite numbers of which `allows` is true.
CLI::Validator numbers(std::string wanted, std::string in_help, std::function<bool(double)> allows) {
  const auto check = [wanted = std::move(wanted), allows = std::move(allows)](std::string& text) -> std::string {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool is_number = end != text.c_str() && *end == '\0' && std::isfinite(value);
    return is_number && allows(value) ? "" : cat("must be ", wanted, ", but is ", text);
  };
  return {check, std::move(in_help)};
}

}  // namespace

CLI::Validator positive() {
  return numbers("a positive number", "POSITIVE", [](double value) { return value > 0; });
}

CLI::Validator not_negative() {
  return numbers("0 or a positive number", "NONNEGATIVE", [](double value) { return value >= 0; });
}

CLI::Validator from_to(double least, double most) {
  return numbers(cat("a number from ", least, " to ", most), cat("in [", least, " - ", most, "]"),
                 [=](double value) { return value >= least && value <= most; });
}

}  // namespace tesserae::cli
