#pragma once

#include <string>
#include <string_view>

namespace tesserae::offload {

/// Where training state lies while nobody works on it.
enum class Tier {
  device,  ///< where units compute
  host,    ///< memory of the host; the same where units compute there
  disk,    ///< a scratch file (disk.h); as much of it as its memory limit allows stays in memory of the host
};

std::string_view to_string(Tier tier);
/// Throws InvalidArgument for anything but "device", "host" and "disk".
Tier tier_from_name(std::string_view name);

/// One for each of the three states that a strategy has a degree for.
struct Tiers {
  Tier parameters = Tier::device;  ///< the pieces that are gathered; masters, too, where these are the same memory
  Tier gradients = Tier::device;   ///< what an optimizer is given
  Tier optimizer = Tier::device;   ///< the optimizer's state, and masters that are no pieces

  bool operator==(const Tiers&) const = default;
  bool uses(Tier tier) const { return parameters == tier || gradients == tier || optimizer == tier; }
};

/// "parameters on disk, optimizer on host"; empty: all on the device.
std::string to_string(const Tiers& tiers);

}  // namespace tesserae::offload
