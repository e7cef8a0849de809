#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace tesserae::shard {

/// What makes a shard's new values, once, on whatever thread comes to it first: the lane on which they are about to be
/// gathered, or whoever needs them before that. Thread-safe.
class DeferredUpdate {
 public:
  explicit DeferredUpdate(std::function<void()> update) : update_(std::move(update)) {}

  /// Returns when it has been done. Throws what it threw, to everybody: it is not tried again.
  void run() {
    const std::scoped_lock lock(mutex_);
    if (const auto update = std::exchange(update_, nullptr)) {
      try {
        update();
      } catch (...) {
        failure_ = std::current_exception();
      }
    }
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

 private:
  std::mutex mutex_;
  std::function<void()> update_;
  std::exception_ptr failure_;
};

}  // namespace tesserae::shard
