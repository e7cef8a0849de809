#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "tesserae/launch/launched_rank.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/signals.h"

namespace tesserae::launch {

/// What a launcher says when it is asked to end.
inline constexpr const char* stopping = "tesserae: stopping after this step; once more to stop at once";

/// How a launcher ends the ranks of its host: asked to by a signal to this process (SIGINT, SIGTERM, SIGUSR1), or by
/// itself. They are asked, and killed when a grace has passed. SIGUSR1 only warns: the first SIGINT or SIGTERM after it
/// asks anew, the second one asks again. Used from the launcher's thread.
class Ending {
 public:
  enum class News { none, asked, asked_again };
  /// What signals have come since the last call.
  News look();

  /// look() would say more than `none`.
  bool has_news() const { return signals_.count() != seen_; }
  bool is_asked() const { return seen_ > 0; }
  bool is_asked_again() const { return again_; }
  /// The first signal that came, or 0.
  int signal() const { return signals_.first(); }
  /// The one that ranks are sent: SIGUSR1 if no other has come, else SIGTERM, also for SIGINT, which a terminal may
  /// have sent them itself.
  int passed_on() const;
  /// Readable once a signal has come, until look() has seen it; -1 after that.
  int descriptor() const { return is_asked() ? -1 : signals_.descriptor(); }

  /// Sends the ranks of this host `signal`. Those of other hosts hear of it from each other, or lose a peer.
  void ask(std::vector<LaunchedRank>& ranks, int signal, std::chrono::milliseconds grace);
  void cut_short() { kill_at_.emplace(std::chrono::milliseconds(0)); }
  bool has_begun() const { return kill_at_.has_value(); }
  /// What is left is killed, and what others have been asked to kill is not waited for.
  bool grace_has_passed() const { return kill_at_ && kill_at_->passed(); }

 private:
  os::StopSignals signals_;
  int seen_ = 0, seen_demands_ = 0;
  bool again_ = false;
  std::optional<os::Deadline> same_demand_;  // what comes until then
  std::optional<os::Deadline> kill_at_;
};

}  // namespace tesserae::launch
