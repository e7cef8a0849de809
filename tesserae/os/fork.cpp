#include "tesserae/os/fork.h"

#include <pthread.h>

#include <atomic>

namespace tesserae::os {
namespace {

/// How many forks lie between the process that made the first guard and this one.
std::atomic<int>& depth() {
  static std::atomic<int> count{0};
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++count; });
  static_cast<void>(registered);
  return count;
}

}  // namespace

ForkGuard::ForkGuard() : depth_(depth()) {}

bool ForkGuard::in_child() const {
  return depth_ != depth();
}

}  // namespace tesserae::os
