#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tesserae/mesh/strategy.h"
#include "tesserae/offload/tier.h"

namespace tesserae::train {

// What ranks tell a new one of how the state is sharded: degrees, lifetimes, tiers, and why these were chosen.
nlohmann::json strategy_json(const mesh::Strategy& strategy, const offload::Tiers& tiers, const std::string& choice);
mesh::Strategy strategy_from(const nlohmann::json& told, mesh::Strategy strategy);

}  // namespace tesserae::train
