#include "tesserae/os/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <optional>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

// What the handler touches: lock-free, and never destroyed while it may run.
std::atomic<int> first_signal{0};
std::atomic<int> signal_count{0};
std::atomic<int> demand_count{0};
std::atomic<int> wake_up{-1};

std::atomic<pid_t> owner{0};
struct sigaction earlier[NSIG];

std::atomic<bool> alive{false};
std::vector<int> caught;
std::optional<Pipe> wake_pipe;

extern "C" void remember(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const struct sigaction& before = earlier[number];
  if (::getpid() != owner.load()) {
    ::sigaction(number, &before, nullptr);
    ::raise(number);  // once this handler has returned
    errno = error;
    return;
  }
  int none = 0;
  first_signal.compare_exchange_strong(none, number);
  if (number != SIGUSR1) demand_count.fetch_add(1);
  signal_count.fetch_add(1);  // who sees it sees the demand, too
  const char byte = 0;
  [[maybe_unused]] const ssize_t written = ::write(wake_up.load(), &byte, 1);  // a full pipe is readable as well
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  }
  errno = error;
}

}  // namespace

void survive_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

void keep_ended_children() {
  struct sigaction now {};
  if (::sigaction(SIGCHLD, nullptr, &now) == 0 && now.sa_handler == SIG_IGN) ::signal(SIGCHLD, SIG_DFL);
}

StopSignals::StopSignals(const std::vector<int>& numbers) {
  if (alive.exchange(true))
    throw InvalidArgument("StopSignals", "one is alive already: a process has one, which is kept or let go of first");
  wake_pipe.emplace(make_pipe());
  ::fcntl(wake_pipe->write.get(), F_SETFL, O_NONBLOCK);
  first_signal = 0;
  signal_count = 0;
  demand_count = 0;
  wake_up = wake_pipe->write.get();
  owner = ::getpid();
  caught = numbers;
  struct sigaction action {};
  action.sa_sigaction = remember;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  for (const int number : caught) {
    ::sigaction(number, nullptr, &earlier[number]);  // there before the handler may run
    ::sigaction(number, &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (const int number : caught) {
    struct sigaction now {};
    // A handler that was set since is the program's own.
    if (::sigaction(number, nullptr, &now) == 0 && now.sa_sigaction == remember) {
      ::sigaction(number, &earlier[number], nullptr);
    }
  }
  wake_up = -1;
  wake_pipe.reset();
  alive = false;
}

int StopSignals::first() const {
  return first_signal;
}

int StopSignals::count() const {
  return signal_count;
}

int StopSignals::demands() const {
  return demand_count;
}

int StopSignals::descriptor() const {
  return wake_pipe->read.get();
}

std::string signal_name(int number) {
  const char* name = ::sigabbrev_np(number);
  return name == nullptr ? cat("signal ", number) : cat("SIG", name);
}

std::string written_at_signal(int signal, int file) {
  if (::ftruncate(file, 0) != 0 || ::lseek(file, 0, SEEK_SET) != 0 || ::raise(signal) != 0) return {};
  std::string text(size_t{1} << 20, '\0');
  const ssize_t size = ::pread(file, text.data(), text.size(), 0);
  text.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return text;
}

}  // namespace tesserae::os
