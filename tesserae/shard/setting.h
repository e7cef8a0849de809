#pragma once

#include <string>

#include "tesserae/mesh/layout.h"
#include "tesserae/offload/tier.h"

namespace tesserae::shard {

/// What the dial is set to: over how many ranks each part of the training state is split, and on which tier it lies.
struct Setting {
  mesh::Degrees degrees = {};
  offload::Tiers tiers = {};

  bool operator==(const Setting&) const = default;
};

/// "P=1 G=2 O=4, optimizer on disk"; tiers that are the device are not named.
inline std::string to_string(const Setting& setting) {
  const std::string tiers = to_string(setting.tiers);
  return to_string(setting.degrees) + (tiers.empty() ? "" : ", " + tiers);
}

}  // namespace tesserae::shard
