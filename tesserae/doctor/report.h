#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tesserae/doctor/finding.h"

namespace tesserae::doctor {

/// What one rank found.
struct RankReport {
  int rank = 0;
  std::string host;
  Findings findings;
};

nlohmann::ordered_json to_json(const RankReport& report);
/// The reverse. Throws InvalidArgument for other text.
RankReport report_from(const std::string& text);

/// A line for each finding, its advice below it; what several ranks found alike stands once, with their numbers.
std::string in_words(const std::vector<RankReport>& reports);

}  // namespace tesserae::doctor
