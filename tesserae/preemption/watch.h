#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tesserae/os/clock.h"
#include "tesserae/os/fork.h"
#include "tesserae/os/signals.h"
#include "tesserae/preemption/command_poll.h"

namespace tesserae::preemption {

/// Who may ask this process to end before its work is done.
struct Sources {
  std::vector<int> signals = {os::signal_interrupt, os::signal_terminate, os::signal_user};
  /// A second SIGINT or SIGTERM ends the process at once, in whatever operation it is. SIGUSR1 is a cluster manager's
  /// warning, after which its SIGTERM is the first; and signals within half a second are the same request: a launcher
  /// and a cluster manager may both pass it on.
  bool second_demand_ends = false;
  /// A file that appears; empty: none. One that is older than this process asked an earlier one, whose work this one
  /// may be continuing: it counts once it was written anew.
  std::string file = {};
  std::string command = {};               ///< for the shell, see CommandPoll; empty: none
  std::chrono::milliseconds every{5000};  ///< how often file and command are asked
  std::chrono::milliseconds command_limit{10'000};
};

/// That this process was asked to end.
struct Notice {
  int signal = 0;      ///< what it counts as: the signal that came, SIGTERM for a file or a command
  std::string reason;  ///< "SIGUSR1", "the file /run/notice", "the command `...`"
};

/// Knows whether this process was asked to end, and by what. Signals are heard at once; file and command are asked by a
/// thread, so that nothing waits for them, until one of them has said yes. What cannot be asked is warned of once and
/// counts as no.
///
/// It tells of this process alone: agree() (agree.h) makes one answer of those of a job's ranks. notice() may be called
/// from any thread. At most one at a time (a second one throws InvalidArgument). A forked child has a copy that hears
/// nothing new.
class Watch {
 public:
  explicit Watch(const Sources& sources);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  /// Nothing: nobody has asked so far. Once there is one there always is.
  std::optional<Notice> notice() const;

 private:
  enum class Polled { nothing, file, command };

  void run(const std::stop_token& stop);
  void poll();
  bool file_asks();
  void end_on_second_demand();

  const Sources sources_;
  os::ForkGuard made_;
  os::StopSignals signals_;
  bool warned_ = false;
  std::unique_ptr<CommandPoll> command_;
  const std::chrono::system_clock::time_point process_began_;
  bool file_is_old_ = false;  // was there from the beginning, and is older than the process
  std::optional<os::Deadline> next_file_, settled_;
  int settled_demands_ = 0;
  std::atomic<Polled> polled_{Polled::nothing};
  std::jthread thread_;  // last: it ends before what it uses
};

}  // namespace tesserae::preemption
