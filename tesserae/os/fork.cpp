#include "tesserae/os/fork.h"

#include <pthread.h>

#include <atomic>

namespace tesserae::os {
namespace {

/// How many forks lie between the process that made the first guard and this one.
constinit std::atomic<int> depth{0};

int depth_from_now_on() {
  static const int counts = ::pthread_atfork(nullptr, nullptr, [] { ++depth; });
  static_cast<void>(counts);
  return depth;
}

constinit std::mutex forks;

std::mutex& mutex_of_forks() {
  static const int taken = ::pthread_atfork([] { forks.lock(); }, [] { forks.unlock(); }, [] { forks.unlock(); });
  static_cast<void>(taken);
  return forks;
}

}  // namespace

ForkGuard::ForkGuard() : depth_(depth_from_now_on()) {}

bool ForkGuard::in_child() const {
  return depth_ != depth;
}

NoForkMeanwhile::NoForkMeanwhile() : lock_(mutex_of_forks()) {}

}  // namespace tesserae::os
