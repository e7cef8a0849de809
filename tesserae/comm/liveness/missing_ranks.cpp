#include "tesserae/comm/liveness/missing_ranks.h"

namespace tesserae::comm {

std::optional<std::vector<int>> MissingRanks::silent_of(std::vector<int> ranks) {
  std::erase(ranks, rank_);
  const auto beats = store_.ask([ranks](LivenessStore& store) { return store.beats(ranks); });
  if (!beats) return server_is_silent() ? std::vector<int>{server_} : std::vector<int>{};
  return pulses_.look(ranks, *beats, std::chrono::steady_clock::now());
}

bool MissingRanks::has_been_still(int rank, std::chrono::milliseconds time) const {
  return pulses_.still_for(time, rank, std::chrono::steady_clock::now());
}

std::optional<Verdict> MissingRanks::verdict(const std::vector<int>& members, const std::vector<int>& living,
                                             const std::string& text, std::chrono::milliseconds deadline) {
  const auto silent = silent_of(members);
  if (!silent) return std::nullopt;
  if (!silent->empty()) return Verdict{Verdict::Kind::timeout, *silent, text};
  // Absent ranks are those of the job: a group may wait for one that waits for a rank of another group.
  std::vector<int> others = living;
  std::erase(others, rank_);
  const auto idle = store_.ask([others](LivenessStore& store) { return store.not_waiting(others); });
  const auto absent = absent_.look(others, idle, deadline, std::chrono::steady_clock::now());
  if (!absent) return std::nullopt;
  const auto stopped = silent_of(*absent);  // of other groups
  if (!stopped) return std::nullopt;
  if (!stopped->empty()) return Verdict{Verdict::Kind::timeout, *stopped, text};
  return Verdict{absent->empty() ? Verdict::Kind::timeout : Verdict::Kind::absent, *absent, text};
}

}  // namespace tesserae::comm
