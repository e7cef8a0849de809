#include "tesserae/comm/lane.h"

#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/thread_name.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "tesserae/comm/call_log.h"
#include "tesserae/comm/error.h"

namespace tesserae::comm {

// A task is `done` when the host may go on; on a device the event orders the caller's stream after the task.
struct Ticket::State {
  std::atomic<bool> done = false;
  std::exception_ptr error;  // written before done
  std::optional<c10::Event> event;
  std::optional<c10::Device> device;
  std::optional<c10::Stream> caller;  // that was current at submit()
  std::mutex mutex;                   // guards task
  std::function<void()> task;         // of a stream: kept until the device has done it, or that stream waits for it

  bool has_task() {
    const std::lock_guard lock(mutex);
    return static_cast<bool>(task);
  }
  void let_go() {
    std::function<void()> last;  // ends after the lock: what it captured may take others
    const std::lock_guard lock(mutex);
    last.swap(task);
  }
  void finish(std::exception_ptr failure) {
    error = std::move(failure);
    done.store(true, std::memory_order_release);
    done.notify_all();
  }
};

void Ticket::wait() const {
  if (!state_) return;
  if (!state_->done.load(std::memory_order_acquire)) {
    const Waiting waiting;
    state_->done.wait(false, std::memory_order_acquire);
  }
  if (state_->error) std::rethrow_exception(state_->error);
  if (state_->event) {
    const c10::impl::VirtualGuardImpl guard(state_->device->type());
    const c10::Stream current = guard.getStream(*state_->device);
    state_->event->block(current);
    // From here on memory that was made on this stream is not used again before the task has been done.
    if (current == state_->caller) state_->let_go();
  }
}

bool Ticket::ready() const {
  return !state_ || state_->done.load(std::memory_order_acquire);
}

std::optional<c10::Device> Ticket::device() const {
  return state_ && state_->event ? state_->device : std::nullopt;
}

struct Lane::Impl {
  virtual ~Impl() = default;
  virtual std::shared_ptr<Ticket::State> submit(std::function<void()> task) = 0;
  virtual void drain() = 0;
};

namespace {

using State = Ticket::State;

// ATen keeps the number of threads in a variable of its own besides the setting of each thread, and a thread that runs
// ATen for the first time takes that. So the caller's number is put back once the lane's thread has set its own.
void use_one_thread(std::thread& thread, std::atomic<bool>& ready) {
  const int threads = at::get_num_threads();
  ready.wait(false);
  if (threads != 1) at::set_num_threads(threads);
}

}  // namespace

struct Lane::Immediate final : Lane::Impl {
  std::exception_ptr failure;

  std::shared_ptr<State> submit(std::function<void()> task) override {
    if (!failure) {
      try {
        task();
        return nullptr;
      } catch (...) {
        failure = std::current_exception();
      }
    }
    auto state = std::make_shared<State>();
    state->finish(failure);
    return state;
  }
  void drain() override {}
};

struct Lane::Threaded final : Lane::Impl {
  struct Task {
    std::function<void()> run;
    std::shared_ptr<State> state;
    std::optional<c10::Stream> stream;  // the caller's current one, on which the task queues what is for a device
  };
  c10::Device device;
  std::mutex mutex;
  std::condition_variable changed;  // a task came, the lane ends, or the lane became idle
  std::deque<Task> tasks;
  bool busy = false;
  bool ending = false;
  std::atomic<bool> started = false;
  std::thread thread;

  Threaded(const std::string& name, c10::Device device) : device(device), thread([this, name] { loop(name); }) {
    use_one_thread(thread, started);
  }

  ~Threaded() override {
    {
      std::lock_guard lock(mutex);
      ending = true;
    }
    changed.notify_all();
    thread.join();
  }

  std::shared_ptr<State> submit(std::function<void()> task) override {
    auto state = std::make_shared<State>();
    std::optional<c10::Stream> stream;
    if (!device.is_cpu()) stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    {
      std::lock_guard lock(mutex);
      tasks.push_back({std::move(task), state, stream});
    }
    changed.notify_all();
    return state;
  }

  void drain() override {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return tasks.empty() && !busy; });
  }

  void loop(const std::string& name) {
    c10::setThreadName("tsm-" + name);
    at::get_num_threads();  // takes ATen's setting now, not at its first use, which would undo ours
    at::set_num_threads(1);
    started = true;
    started.notify_all();
    std::exception_ptr failure;
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return ending || !tasks.empty(); });
      if (tasks.empty()) return;
      Task task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      lock.unlock();
      if (!failure) {
        try {
          const c10::OptionalStreamGuard as_caller(task.stream);
          task.run();
        } catch (...) {
          failure = std::current_exception();
        }
      }
      task.run = nullptr;  // what it captured is gone before the ticket says done
      task.state->finish(failure);
      lock.lock();
      busy = false;
      if (tasks.empty()) changed.notify_all();
    }
  }
};

struct Lane::Streamed final : Lane::Impl {
  c10::Device device;
  c10::impl::VirtualGuardImpl guard;
  c10::Stream stream;
  std::mutex mutex;
  c10::Event before;
  std::exception_ptr failure;
  // Tickets in the order of submission, reused once nobody else holds them: an event costs more than a search. The host
  // is ahead of the device: what a task captured is let go of by the first submission after the device has done it,
  // for until then its memory would be given to whoever asks on the stream that it was made on; or by the wait of that
  // stream, behind which it may be given.
  std::deque<std::shared_ptr<State>> states;

  explicit Streamed(c10::Device device)
      : device(device),
        guard(device.type()),
        stream(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
        before(device.type()) {}

  ~Streamed() override { drain(); }

  std::shared_ptr<State> submit(std::function<void()> task) override {
    std::lock_guard lock(mutex);
    auto state = next_state();
    if (!failure) {
      try {
        state->caller = guard.getStream(device);
        before.record(*state->caller);
        before.block(stream);
        const c10::StreamGuard on_lane(stream);
        task();
        state->event->record(stream);
        const std::lock_guard kept(state->mutex);
        state->task = std::move(task);
      } catch (...) {
        failure = std::current_exception();
      }
    }
    state->finish(failure);
    return state;
  }

  std::shared_ptr<State> next_state() {
    try {
      for (const auto& state : states) {
        if (!state->has_task()) continue;
        if (!state->event->query()) break;  // nor are those after it done
        state->let_go();
      }
    } catch (...) {  // a device error: the tickets' users meet it
    }
    if (!states.empty() && states.front().use_count() == 1 && !states.front()->has_task()) {
      states.push_back(std::move(states.front()));
      states.pop_front();
    } else {
      auto state = std::make_shared<State>();
      state->event.emplace(device.type());
      state->device = device;
      states.push_back(std::move(state));
    }
    return states.back();
  }

  void drain() final {
    std::lock_guard lock(mutex);
    try {
      guard.synchronizeStream(stream);
      for (const auto& state : states) state->let_go();
    } catch (...) {  // a device error: the tickets' users meet it
    }
  }
};

Lane::Lane(std::string name, Kind kind, c10::Device device) : kind_(kind) {
  switch (kind) {
    case Kind::threaded:
      impl_ = std::make_unique<Threaded>(name, device);
      break;
    case Kind::stream:
      impl_ = std::make_unique<Streamed>(device);
      break;
    case Kind::immediate:
      impl_ = std::make_unique<Immediate>();
      break;
  }
}

Lane::~Lane() {
  if (made_.in_child()) static_cast<void>(impl_.release());  // its thread cannot be joined
}

Ticket Lane::submit(std::function<void()> task) {
  if (kind_ != Kind::immediate && made_.in_child()) throw ForkedChild("Lane");
  if (log_) {
    task = [log = log_, task = std::move(task)] {
      const CallLog::Scope scope(log.get());
      task();
    };
  }
  return Ticket(impl_->submit(std::move(task)));
}

void Lane::drain() {
  if (!made_.in_child()) impl_->drain();
}

}  // namespace tesserae::comm
