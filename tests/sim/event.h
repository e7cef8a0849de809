#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

namespace tesserae::sim {

/// [Note: moments] One place in the order of one stream: "all that was enqueued before". It is reached once, and stays
/// reached. What waits, waits for a moment, never for an event: so an event that is recorded again does not move a wait
/// that was enqueued before, and one that is recorded on another stream does not end it early. CUDA's rule:
/// cudaStreamWaitEvent waits for the most recent record at the time of the call.
class Moment {
 public:
  using Clock = std::chrono::steady_clock;

  /// By the stream, once.
  void reach() {
    when_ = Clock::now();
    reached_.store(true, std::memory_order_release);
    reached_.notify_all();
  }
  bool reached() const { return reached_.load(std::memory_order_acquire); }
  void wait() const { reached_.wait(false, std::memory_order_acquire); }
  /// Of a moment that was reached.
  Clock::time_point when() const { return when_; }

 private:
  std::atomic<bool> reached_ = false;
  Clock::time_point when_;  // written before reached_
};

using MomentPtr = std::shared_ptr<Moment>;

/// What c10::Event holds: the moment of its last record. Any thread.
class Event {
 public:
  void record(MomentPtr moment) {
    const std::lock_guard lock(mutex_);
    last_ = std::move(moment);
  }
  /// Null: it was never recorded.
  MomentPtr last() const {
    const std::lock_guard lock(mutex_);
    return last_;
  }

 private:
  mutable std::mutex mutex_;
  MomentPtr last_;
};

}  // namespace tesserae::sim
