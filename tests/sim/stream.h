#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>

#include "tests/sim/event.h"

namespace tesserae::sim {

/// A queue of work with a thread of its own, which runs it in order. Before a task it sleeps for a random while, most
/// often not at all: so two streams that nobody ordered meet in another order with every seed.
///
/// A task that throws has failed for good: its device keeps the failure (Device::fail), whoever waits for the device
/// next meets it. The tasks after it run all the same, as kernels do after one that wrote nonsense.
///
/// Any thread may enqueue; nothing here throws.
class Stream {
 public:
  Stream(c10::DeviceIndex device, c10::StreamId id, bool high_priority);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Runs `work` after all that was enqueued before, and returns at once. `what`: its name, which lives for ever.
  void enqueue(const char* what, std::function<void()> work);
  /// The moment after all that was enqueued so far.
  MomentPtr record();
  /// What is enqueued from here on runs after `moment`. Null: nothing to wait for.
  void wait_for(MomentPtr moment);

  bool idle() const;
  /// Blocks the host until all that was enqueued before this call has run. Not for the stream's own thread.
  void drain() const;

  /// The delays from here on. A stream of high priority gets half of them: a hint, as in CUDA, that orders nothing.
  void set_delays(uint64_t seed, std::chrono::microseconds longest);

  /// Runs what is there, then ends the thread; later work is dropped. Gives up after `patience`: a task may wait for
  /// something that never comes.
  void stop(std::chrono::milliseconds patience);

  bool high_priority() const { return high_priority_; }

 private:
  struct Task {
    const char* what;
    std::function<void()> run;
  };
  void loop();
  std::chrono::microseconds next_delay();

  const c10::DeviceIndex device_;
  const c10::StreamId id_;
  const bool high_priority_;
  mutable std::mutex mutex_;
  mutable std::condition_variable came_;      // a task, or the end
  mutable std::condition_variable finished_;  // a task, or the thread
  std::deque<Task> tasks_;
  int64_t submitted_ = 0;
  int64_t done_ = 0;
  bool ending_ = false;
  bool ended_ = false;
  std::mt19937_64 random_;
  std::chrono::microseconds longest_{0};
};

}  // namespace tesserae::sim
