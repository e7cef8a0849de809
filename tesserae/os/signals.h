#pragma once

namespace tesserae::os {

/// From now on writing to a connection whose other side is gone fails instead of ending this process (SIGPIPE), unless
/// the program handles that signal itself.
void survive_broken_pipes();

/// While it lives, SIGINT, SIGTERM and SIGUSR1 (which cluster managers send ahead of the end of a job's time) do not
/// end the process but are remembered, and can be polled. At most one at a time (a second one throws InvalidArgument).
/// The earlier handlers come back when it is destroyed.
class StopSignals {
 public:
  StopSignals();
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

}  // namespace tesserae::os
