#include "tesserae/shard/exposed_time.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <utility>

namespace tesserae::shard {

void ExposedTime::wait(const comm::Ticket& ticket) {
  if (const auto device = ticket.device()) {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device->type()).getStream(*device);
    if (ticket == last_ && stream == last_by_) return;
    collect();
    Wait wait = next(device->type());
    wait.begin.record(stream);
    ticket.wait();
    wait.end.record(stream);
    running_.push_back(std::move(wait));
    last_ = ticket;
    last_by_ = stream;
    return;
  }
  if (ticket.ready()) {
    ticket.wait();
    return;
  }
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  ticket.wait();
  seconds_ += std::chrono::duration<double>(Clock::now() - begin).count();
}

double ExposedTime::seconds() {
  collect();
  return seconds_;
}

void ExposedTime::collect() {
  while (!running_.empty() && running_.front().end.query()) {
    Wait& wait = running_.front();
    seconds_ += wait.begin.elapsedTime(wait.end) / 1e3;
    free_.push_back(std::move(wait));
    running_.pop_front();
  }
}

ExposedTime::Wait ExposedTime::next(c10::DeviceType type) {
  if (free_.empty())
    return {c10::Event(type, c10::EventFlag::BACKEND_DEFAULT), c10::Event(type, c10::EventFlag::BACKEND_DEFAULT)};
  Wait wait = std::move(free_.back());
  free_.pop_back();
  return wait;
}

}  // namespace tesserae::shard
