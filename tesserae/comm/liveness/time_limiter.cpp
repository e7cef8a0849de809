#include "tesserae/comm/liveness/time_limiter.h"

#include <c10/util/thread_name.h>

namespace tesserae::comm {

TimeLimiter::TimeLimiter() : thread_([queue = queue_] { serve(queue); }) {}

TimeLimiter::~TimeLimiter() {
  {
    std::lock_guard lock(queue_->mutex);
    queue_->closed = true;
  }
  queue_->changed.notify_all();
  if (busy()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void TimeLimiter::post(std::function<void()> request) {
  {
    std::lock_guard lock(queue_->mutex);
    queue_->requests.push_back(std::move(request));
    ++queue_->open;
  }
  queue_->changed.notify_all();
}

bool TimeLimiter::busy() const {
  std::lock_guard lock(queue_->mutex);
  return queue_->open > 0;
}

void TimeLimiter::serve(const std::shared_ptr<Queue>& queue) {
  c10::setThreadName("tsm-store");
  std::unique_lock lock(queue->mutex);
  for (;;) {
    queue->changed.wait(lock, [&] { return queue->closed || !queue->requests.empty(); });
    if (queue->requests.empty()) return;
    const auto request = std::move(queue->requests.front());
    queue->requests.pop_front();
    lock.unlock();
    request();
    lock.lock();
    --queue->open;
  }
}

}  // namespace tesserae::comm
