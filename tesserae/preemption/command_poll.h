#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "tesserae/os/clock.h"
#include "tesserae/os/process.h"

namespace tesserae::preemption {

/// Asks a command of the shell again and again: exit status 0 is yes, any other is no. What it writes is dropped. One
/// that takes longer than `limit` is killed with what it has started, and the next one waits for its end. One that
/// takes too long, cannot be run (status 126 and 127) or is killed by a signal counts as no, and is warned of once.
///
/// Used from one thread. Destroying it ends a command that runs.
class CommandPoll {
 public:
  CommandPoll(std::string command, std::chrono::milliseconds every, std::chrono::milliseconds limit);
  ~CommandPoll();
  CommandPoll(const CommandPoll&) = delete;
  CommandPoll& operator=(const CommandPoll&) = delete;

  /// Starts the command if it is time, looks whether it has ended, kills it if it is late; true when it has said yes.
  /// Never waits.
  bool poll();

 private:
  void start();
  void warn(const std::string& what);

  const std::string command_;
  const std::chrono::milliseconds every_, limit_;
  std::optional<os::Process> running_;
  std::optional<os::Deadline> next_, late_;
  bool killed_ = false;
  bool warned_ = false;
};

}  // namespace tesserae::preemption
