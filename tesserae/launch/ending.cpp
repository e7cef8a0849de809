#include "tesserae/launch/ending.h"

#include "tesserae/os/signal_numbers.h"

namespace tesserae::launch {

Ending::News Ending::look() {
  const int count = signals_.count();
  if (count == seen_) return News::none;
  const bool again = is_asked();
  seen_ = count;
  return again ? News::asked_again : News::asked;
}

int Ending::passed_on() const {
  return signal() == os::signal_interrupt ? os::signal_terminate : signal();
}

void Ending::ask(std::vector<LaunchedRank>& ranks, int signal, std::chrono::milliseconds grace) {
  for (LaunchedRank& rank : ranks) {
    if (rank.process) rank.process->signal(signal);
  }
  kill_at_.emplace(grace);
}

}  // namespace tesserae::launch
