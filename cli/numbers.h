#pragma once

#include <CLI/CLI.hpp>

// What numbers on the command line may be. CLI11's own checks let nan pass, and name bounds of 300 digits.
namespace tesserae::cli {

/// Above 0, and finite.
CLI::Validator positive();

/// 0 or above, and finite.
CLI::Validator not_negative();

/// From `least` to `most`, both included.
CLI::Validator from_to(double least, double most);

}  // namespace tesserae::cli
