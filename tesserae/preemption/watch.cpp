#include "tesserae/preemption/watch.h"

#include <cstdlib>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/os/files.h"

namespace tesserae::preemption {
namespace {

constexpr std::chrono::milliseconds look_every(50);
constexpr std::chrono::milliseconds same_request(500);

}  // namespace

Watch::Watch(const Sources& sources)
    : sources_(sources),
      signals_(sources.signals),
      process_began_(std::chrono::system_clock::now() - os::process_age()) {
  if (!sources.file.empty()) {
    const os::FileStatus found = os::files().status(sources.file);
    file_is_old_ = found.kind != os::FileKind::missing && found.modified < process_began_;
    if (file_is_old_) {
      log(LogLevel::warning, cat("preemption: ", sources.file,
                                 " is older than this process: it does not ask it to end, until it is written anew"));
    }
  }
  if (!sources.command.empty()) {
    command_ = std::make_unique<CommandPoll>(sources.command, sources.every, sources.command_limit);
  }
  if (sources.second_demand_ends || command_ || !sources.file.empty()) {
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }
}

Watch::~Watch() {
  if (!made_.in_child()) return;
  // The thread and the command are the parent's.
  if (thread_.joinable()) new std::jthread(std::move(thread_));
  command_.release();
}

std::optional<Notice> Watch::notice() const {
  if (const int number = signals_.first(); number != 0) return Notice{number, os::signal_name(number)};
  switch (polled_.load()) {
    case Polled::file:
      return Notice{os::signal_terminate, cat("the file ", sources_.file)};
    case Polled::command:
      return Notice{os::signal_terminate, cat("the command `", sources_.command, "`")};
    case Polled::nothing:
      break;
  }
  return std::nullopt;
}

void Watch::run(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    if (sources_.second_demand_ends) end_on_second_demand();
    try {
      poll();
    } catch (const Error& error) {
      if (!std::exchange(warned_, true)) log(LogLevel::warning, cat("preemption: ", error.what(), "; taken as no"));
    }
    os::sleep_for(look_every);
  }
}

void Watch::poll() {
  if (notice()) {
    command_.reset();
  } else if (!sources_.file.empty() && file_asks()) {
    polled_ = Polled::file;
  } else if (command_ && command_->poll()) {
    polled_ = Polled::command;
  }
}

bool Watch::file_asks() {
  if (next_file_ && !next_file_->passed()) return false;
  next_file_.emplace(sources_.every);
  const os::FileStatus found = os::files().status(sources_.file);
  if (found.kind == os::FileKind::missing) {
    file_is_old_ = false;  // whatever comes now is new, also by a clock that is behind
    return false;
  }
  return !file_is_old_ || found.modified >= process_began_;
}

void Watch::end_on_second_demand() {
  const int demands = signals_.demands();
  if (demands == 0) return;
  if (!settled_) settled_.emplace(same_request);
  if (settled_demands_ == 0) {
    if (settled_->passed()) settled_demands_ = demands;
  } else if (demands > settled_demands_) {
    std::_Exit(128 + signals_.first());
  }
}

}  // namespace tesserae::preemption
