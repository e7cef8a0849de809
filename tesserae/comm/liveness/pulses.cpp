#include "tesserae/comm/liveness/pulses.h"

#include <cstddef>

namespace tesserae::comm {
namespace {

// Two looks within this time, and two beats, are in short order.
constexpr std::chrono::milliseconds lively{1000};

}  // namespace

std::optional<std::vector<int>> Pulses::look(const std::vector<int>& ranks, const std::vector<int64_t>& beats,
                                             TimePoint now) {
  std::vector<int> silent;
  bool unsure = false;
  for (size_t i = 0; i < ranks.size(); ++i) {
    Pulse& pulse = pulses_.try_emplace(ranks[i], Pulse{beats[i], now, now, {}}).first->second;
    if (pulse.beats != beats[i]) {
      if (now - pulse.sampled < lively + slack_) pulse.alive = now;
      pulse.beats = beats[i];
      pulse.changed = now;
    }
    pulse.sampled = now;
    if (now - pulse.changed >= silence + slack_) {
      silent.push_back(ranks[i]);
    } else if (now - pulse.alive >= lively + slack_) {
      unsure = true;
    }
  }
  if (unsure) return std::nullopt;
  return silent;
}

bool Pulses::still_for(std::chrono::milliseconds time, int rank, TimePoint now) const {
  const auto found = pulses_.find(rank);
  return found != pulses_.end() && now - found->second.changed >= time;
}

}  // namespace tesserae::comm
