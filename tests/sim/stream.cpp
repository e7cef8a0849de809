#include "tests/sim/stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/thread_name.h>

#include <exception>
#include <thread>
#include <utility>

#include "tesserae/base/error.h"
#include "tests/sim/device.h"
#include "tests/sim/operation.h"

namespace tesserae::sim {

// The thread is never joined: a program may end while a task waits for a peer that never comes. The stream itself lives
// for ever (Device).
Stream::Stream(c10::DeviceIndex device, c10::StreamId id, bool high_priority)
    : device_(device), id_(id), high_priority_(high_priority) {
  std::thread([this] { loop(); }).detach();
}

void Stream::enqueue(const char* what, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return;
    tasks_.push_back({what, std::move(work)});
    ++submitted_;
  }
  came_.notify_one();
}

MomentPtr Stream::record() {
  auto moment = std::make_shared<Moment>();
  {
    const std::lock_guard lock(mutex_);
    if (ending_ || submitted_ == done_) {  // nothing is before it
      moment->reach();
      return moment;
    }
  }
  enqueue("the record of an event", [moment] { moment->reach(); });
  return moment;
}

void Stream::wait_for(MomentPtr moment) {
  if (!moment || moment->reached()) return;
  enqueue("the wait for an event", [moment = std::move(moment)] { moment->wait(); });
}

bool Stream::idle() const {
  const std::lock_guard lock(mutex_);
  return submitted_ == done_;
}

void Stream::drain() const {
  std::unique_lock lock(mutex_);
  const int64_t until = submitted_;
  finished_.wait(lock, [&] { return done_ >= until || ended_; });
}

void Stream::set_delays(uint64_t seed, std::chrono::microseconds longest) {
  const std::lock_guard lock(mutex_);
  std::seed_seq mixed{seed, static_cast<uint64_t>(device_), static_cast<uint64_t>(id_)};
  random_.seed(mixed);
  longest_ = high_priority_ ? longest / 2 : longest;
}

void Stream::stop(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  ending_ = true;
  came_.notify_one();
  finished_.wait_for(lock, patience, [&] { return ended_; });
}

// Of eight tasks five run at once, two are a little late, one is very late: a stream must be able to fall behind
// another by several tasks, and a test must come to an end.
std::chrono::microseconds Stream::next_delay() {
  if (longest_.count() <= 0) return {};
  const uint64_t kind = random_() % 8;
  if (kind < 5) return {};
  const auto longest = kind == 7 ? longest_ : longest_ / 8;
  return std::chrono::microseconds(random_() % (static_cast<uint64_t>(longest.count()) + 1));
}

void Stream::loop() {
  c10::setThreadName(cat("sim", static_cast<int>(device_), ".", id_));
  const at::AutoDispatchBelowADInplaceOrView kernels_only;
  std::unique_lock lock(mutex_);
  for (;;) {
    came_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) break;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    const auto delay = next_delay();
    lock.unlock();
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    {
      const Operation operation(task.what);
      try {
        task.run();
      } catch (...) {
        Device::at(device_).fail(task.what, std::current_exception());
      }
      task.run = nullptr;  // what it holds may be memory of this device
    }
    lock.lock();
    ++done_;
    finished_.notify_all();
  }
  ended_ = true;
  finished_.notify_all();
}

}  // namespace tesserae::sim
