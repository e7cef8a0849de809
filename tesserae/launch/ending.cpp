#include "tesserae/launch/ending.h"

#include <utility>

#include "tesserae/os/signal_numbers.h"

namespace tesserae::launch {
namespace {

// `timeout`, for one, sends a signal to its child, and once more to the group. As long as ranks take it to be one.
constexpr std::chrono::milliseconds same_demand(500);

}  // namespace

Ending::News Ending::look() {
  const int count = signals_.count(), demands = signals_.demands();
  if (count == seen_) return News::none;
  const bool first = std::exchange(seen_, count) == 0;
  if (std::exchange(seen_demands_, demands) == demands) return first ? News::asked : News::none;
  if (!same_demand_) {
    same_demand_.emplace(same_demand);
    return News::asked;
  }
  if (!same_demand_->passed()) return News::none;
  again_ = true;
  return News::asked_again;
}

int Ending::passed_on() const {
  return signals_.demands() > 0 ? os::signal_terminate : signal();
}

void Ending::ask(std::vector<LaunchedRank>& ranks, int signal, std::chrono::milliseconds grace) {
  for (LaunchedRank& rank : ranks) {
    if (rank.process) rank.process->signal(signal);
  }
  kill_at_.emplace(grace);
}

}  // namespace tesserae::launch
