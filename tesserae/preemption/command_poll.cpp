#include "tesserae/preemption/command_poll.h"

#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/os/signal_numbers.h"

namespace tesserae::preemption {

CommandPoll::CommandPoll(std::string command, std::chrono::milliseconds every, std::chrono::milliseconds limit)
    : command_(std::move(command)), every_(every), limit_(limit) {}

CommandPoll::~CommandPoll() {
  try {
    if (running_ && !running_->poll()) running_->signal_group(os::signal_kill);
  } catch (const IoError&) {  // somebody else has reaped it
  }
}

bool CommandPoll::poll() {
  if (!running_) {
    if (!next_ || next_->passed()) start();
    return false;
  }
  const std::optional<os::Exit> exit = running_->poll();
  if (!exit) {
    if (late_->passed() && !killed_) {
      running_->signal_group(os::signal_kill);
      killed_ = true;
      warn(cat("was killed after ", std::chrono::duration<double>(limit_).count(), " s"));
    }
    return false;
  }
  running_.reset();
  if (killed_) return false;
  const bool cannot_run = exit->code == 126 || exit->code == 127;  // the shell's own statuses
  if (exit->signal != 0 || cannot_run) warn(exit->text());
  return exit->success();
}

void CommandPoll::start() {
  next_.emplace(every_);
  late_.emplace(limit_);
  killed_ = false;
  try {
    running_ = os::Process::spawn({.arguments = {"sh", "-c", "exec < /dev/null > /dev/null 2>&1\n" + command_},
                                   .die_with_parent = true,
                                   .new_group = true});
  } catch (const IoError& error) {
    warn(error.what());
  }
}

void CommandPoll::warn(const std::string& what) {
  if (std::exchange(warned_, true)) return;
  log(LogLevel::warning, cat("preemption: the command `", command_, "` ", what, ": taken as no, and not said again"));
}

}  // namespace tesserae::preemption
