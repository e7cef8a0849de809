#include "tesserae/os/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <optional>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

constexpr int caught[] = {SIGINT, SIGTERM, SIGUSR1};

// What the handler touches: lock-free, and never destroyed while it may run.
std::atomic<int> first_signal{0};
std::atomic<int> signal_count{0};
std::atomic<int> demand_count{0};
std::atomic<int> wake_up{-1};

std::atomic<bool> alive{false};
std::optional<Pipe> wake_pipe;
struct sigaction earlier[std::size(caught)];

extern "C" void remember(int number) {
  const int error = errno;
  int none = 0;
  first_signal.compare_exchange_strong(none, number);
  signal_count.fetch_add(1);
  if (number != SIGUSR1) demand_count.fetch_add(1);
  const char byte = 0;
  [[maybe_unused]] const ssize_t written = ::write(wake_up.load(), &byte, 1);  // a full pipe is readable as well
  errno = error;
}

}  // namespace

void survive_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

StopSignals::StopSignals() {
  if (alive.exchange(true)) throw InvalidArgument("StopSignals", "one is alive already");
  wake_pipe.emplace(make_pipe());
  ::fcntl(wake_pipe->write.get(), F_SETFL, O_NONBLOCK);
  first_signal = 0;
  signal_count = 0;
  demand_count = 0;
  wake_up = wake_pipe->write.get();
  struct sigaction action {};
  action.sa_handler = remember;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < std::size(caught); ++i) ::sigaction(caught[i], &action, &earlier[i]);
}

StopSignals::~StopSignals() {
  for (size_t i = 0; i < std::size(caught); ++i) ::sigaction(caught[i], &earlier[i], nullptr);
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

}  // namespace tesserae::os
