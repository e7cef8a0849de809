#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tesserae/mesh/strategy.h"

namespace tesserae::train {

// What ranks tell a new one of how the state is sharded: degrees, lifetimes, and why these were chosen.
nlohmann::json strategy_json(const mesh::Strategy& strategy, const std::string& choice);
mesh::Strategy strategy_from(const nlohmann::json& told, mesh::Strategy strategy);

}  // namespace tesserae::train
