#include "tesserae/offload/tier.h"

#include <array>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::offload {
namespace {

constexpr std::array<std::string_view, 3> names{"device", "host", "disk"};

}  // namespace

std::string_view to_string(Tier tier) {
  return names[static_cast<size_t>(tier)];
}

Tier tier_from_name(std::string_view name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<Tier>(i);
  }
  throw InvalidArgument("tier_from_name", cat("\"", name, "\" is no tier; there are device, host and disk"));
}

std::string to_string(const Tiers& tiers) {
  std::string text;
  for (const auto& [state, tier] : {std::pair<std::string_view, Tier>{"parameters", tiers.parameters},
                                    {"gradients", tiers.gradients},
                                    {"optimizer", tiers.optimizer}}) {
    if (tier == Tier::device) continue;
    text += cat(text.empty() ? "" : ", ", state, " on ", to_string(tier));
  }
  return text;
}

}  // namespace tesserae::offload
