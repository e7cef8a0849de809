#include "tests/sim/device.h"

#include <atomic>
#include <cstdlib>
#include <utility>

#include "tests/sim/operation.h"

namespace tesserae::sim {

/// All devices. They are never destroyed: tensors of static variables may outlive everything.
struct Everything {
  std::mutex mutex;
  Options options;
  std::array<std::atomic<Device*>, device_count> devices{};

  static Everything& get() {
    static Everything* const all = [] {
      auto* made = new Everything;
      // Before the libraries that kernels use are torn down.
      std::atexit([] {
        for (auto& device : Everything::get().devices) {
          if (Device* const used = device.load()) used->stop();
        }
      });
      return made;
    }();
    return *all;
  }

  Device& made(c10::DeviceIndex index) {
    const std::lock_guard lock(mutex);
    auto& device = devices[static_cast<size_t>(index)];
    if (!device.load()) {
      auto* const fresh = new Device(index);
      fresh->options_ = options;
      device = fresh;
    }
    return *device.load();
  }
};

namespace {

constexpr std::chrono::milliseconds patience_at_the_end{2000};

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, device_count> these_streams{};
thread_local const char* this_operation = "";
thread_local const char* last_operation = "";

bool is_device(c10::DeviceIndex index) {
  return index >= 0 && index < device_count;
}

}  // namespace

c10::Device device(c10::DeviceIndex index) {
  return {c10::kPrivateUse1, index};
}

void restart(const Options& options) {
  auto& all = Everything::get();
  for (auto& device : all.devices) {
    if (Device* const used = device.load()) used->for_each_stream([](Stream& stream) { stream.drain(); });
  }
  const std::lock_guard lock(all.mutex);
  all.options = options;
  for (auto& device : all.devices) {
    if (Device* const used = device.load()) used->restart_streams(options);
  }
}

Counters counters(c10::DeviceIndex device) {
  return Device::at(device).tally().read();
}

Device::Device(c10::DeviceIndex index) : index_(index), memory_(index) {}

Device& Device::at(c10::DeviceIndex index) {
  if (!is_device(index)) {
    throw InvalidArgument("sim",
                          cat("device ", static_cast<int>(index), ": there are ", static_cast<int>(device_count)));
  }
  Device* const known = find(index);
  return known ? *known : Everything::get().made(index);
}

Device* Device::find(c10::DeviceIndex index) noexcept {
  return is_device(index) ? Everything::get().devices[static_cast<size_t>(index)].load() : nullptr;
}

Stream& Device::stream(c10::StreamId id) {
  if (id < 0 || id >= static_cast<c10::StreamId>(streams_.size())) {
    throw InvalidArgument("sim", cat("stream ", id, " of device ", static_cast<int>(index_), ": a device has ",
                                     streams_.size(), "; is it a stream of another kind of device?"));
  }
  const std::lock_guard lock(mutex_);
  auto& stream = streams_[static_cast<size_t>(id)];
  if (!stream) {
    stream = std::make_unique<Stream>(index_, id, /*high_priority=*/id > pool_size);
    stream->set_delays(options_.seed, options_.longest_delay);
  }
  return *stream;
}

c10::StreamId Device::next_stream(bool high_priority) {
  const std::lock_guard lock(mutex_);
  auto& next = next_[high_priority ? 1 : 0];
  const c10::StreamId id = 1 + (high_priority ? pool_size : 0) + next;
  next = (next + 1) % pool_size;
  return id;
}

Stream& Device::current_stream() {
  return stream(sim::current_stream(index_));
}

template <class Do>
void Device::for_each_stream(const Do& what) {
  for (auto& slot : streams_) {
    Stream* stream = nullptr;
    {
      const std::lock_guard lock(mutex_);
      stream = slot.get();
    }
    if (stream) what(*stream);
  }
}

void Device::synchronize() {
  ++tally_.synchronizations;
  for_each_stream([](Stream& stream) { stream.drain(); });
  check();
}

void Device::synchronize(const Stream& stream) {
  ++tally_.synchronizations;
  stream.drain();
  check();
}

void Device::synchronize(const Moment& moment) {
  ++tally_.synchronizations;
  moment.wait();
  check();
}

bool Device::idle() {
  bool idle = true;
  for_each_stream([&](Stream& stream) { idle = idle && stream.idle(); });
  return idle;
}

void Device::fail(const char* what, std::exception_ptr cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const Error&) {  // it says what it is
  } catch (const std::exception& other) {
    cause = std::make_exception_ptr(
        DeviceFailure("sim", cat(what, " failed on device ", static_cast<int>(index_), ": ", other.what())));
  } catch (...) {
  }
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = cause;
}

void Device::check() {
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    failure = failure_;
  }
  if (failure) std::rethrow_exception(failure);
}

void Device::restart_streams(const Options& options) {
  memory_.set_limit(Memory::capacity);  // its lock is taken before ours, never within
  const std::lock_guard lock(mutex_);
  options_ = options;
  failure_ = nullptr;
  for (auto& stream : streams_) {
    if (stream) stream->set_delays(options.seed, options.longest_delay);
  }
}

void Device::stop() {
  for_each_stream([](Stream& stream) { stream.stop(patience_at_the_end); });
}

c10::DeviceIndex current_device() noexcept {
  return this_device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) noexcept {
  return is_device(index) ? std::exchange(this_device, index) : this_device;
}

c10::StreamId current_stream(c10::DeviceIndex index) noexcept {
  return is_device(index) ? these_streams[static_cast<size_t>(index)] : 0;
}

c10::StreamId exchange_stream(c10::DeviceIndex index, c10::StreamId id) noexcept {
  return is_device(index) ? std::exchange(these_streams[static_cast<size_t>(index)], id) : 0;
}

Operation::Operation(const char* name) : outer_(std::exchange(this_operation, name)) {
  last_operation = name;
}

Operation::~Operation() {
  this_operation = outer_;
}

const char* Operation::current() {
  return this_operation;
}

const char* Operation::last() {
  return last_operation;
}

}  // namespace tesserae::sim
