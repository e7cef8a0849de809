#pragma once

#include <string>
#include <vector>

#include "tesserae/os/signal_numbers.h"

namespace tesserae::os {

/// From now on writing to a connection whose other side is gone fails instead of ending this process (SIGPIPE), unless
/// the program handles that signal itself.
void survive_broken_pipes();

/// Has the kernel keep how children end, for who waits for them, where this process was started with SIGCHLD ignored
/// (as services and shells with `trap "" CHLD` do). A handler stays. What it starts from then on does not ignore it
/// either.
void keep_ended_children();

/// While it lives, these signals (SIGUSR1 is what cluster managers send ahead of the end of a job's time) do not end
/// the process but are remembered, and can be polled. Handlers that were there before are called too, and come back
/// when it is destroyed. A child that is forked meanwhile is not asked: it takes the signal as it would have before. At
/// most one at a time (a second one throws InvalidArgument).
class StopSignals {
 public:
  explicit StopSignals(const std::vector<int>& numbers = {signal_interrupt, signal_terminate, signal_user});
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  int first() const;  ///< the number of the first one that came, or 0
  int count() const;  ///< how many came
  /// How many of them were SIGINT or SIGTERM: SIGUSR1 only warns, and SIGTERM comes after it. A user who presses Ctrl-C
  /// twice means it.
  int demands() const;
  /// Readable once one has come, and for ever after: for wait_readable.
  int descriptor() const;
};

/// "SIGTERM" for SIGTERM.
std::string signal_name(int number);

/// Raises `signal` in the calling thread and returns what its handler, which must be there and return, has written to
/// `file`: all that there is in it afterwards, at most 1 MiB. Empty where the file cannot be read.
std::string written_at_signal(int signal, int file);

}  // namespace tesserae::os
