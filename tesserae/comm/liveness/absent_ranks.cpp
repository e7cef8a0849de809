#include "tesserae/comm/liveness/absent_ranks.h"

#include <algorithm>

namespace tesserae::comm {
namespace {

// Transports give up by themselves 15 s after their deadlines.
constexpr std::chrono::milliseconds shortest{3000}, longest{8000};

}  // namespace

std::chrono::milliseconds AbsentRanks::confirmation(std::chrono::milliseconds deadline) {
  return std::clamp(deadline / 10, shortest, longest);
}

std::optional<std::vector<int>> AbsentRanks::look(const std::vector<int>& others,
                                                  const std::optional<std::vector<int>>& idle,
                                                  std::chrono::milliseconds deadline, TimePoint now) {
  if (idle && idle->empty()) return *idle;
  if (now - seen_ > pause_) {
    suspects_ = others;
    since_ = now;
  }
  seen_ = now;
  if (idle) std::erase_if(suspects_, [&](int rank) { return std::ranges::find(*idle, rank) == idle->end(); });
  if (suspects_.empty()) return suspects_;
  if (now - since_ < confirmation(deadline)) return std::nullopt;
  const bool told = idle && 2 * static_cast<int>(suspects_.size()) <= job_;
  return told ? suspects_ : std::vector<int>();
}

}  // namespace tesserae::comm
