#include "tesserae/comm/courier.h"

#include <c10/util/thread_name.h>

namespace tesserae::comm {

Courier::Courier() : thread_([desk = desk_] { serve(desk); }) {}

Courier::~Courier() {
  {
    std::lock_guard lock(desk_->mutex);
    desk_->closed = true;
  }
  desk_->changed.notify_all();
  if (given_up_) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Courier::post(std::function<void()> request) {
  {
    std::lock_guard lock(desk_->mutex);
    desk_->requests.push_back(std::move(request));
  }
  desk_->changed.notify_all();
}

void Courier::serve(const std::shared_ptr<Desk>& desk) {
  c10::setThreadName("tsm-courier");
  std::unique_lock lock(desk->mutex);
  for (;;) {
    desk->changed.wait(lock, [&] { return desk->closed || !desk->requests.empty(); });
    if (desk->requests.empty()) return;
    const auto request = std::move(desk->requests.front());
    desk->requests.pop_front();
    lock.unlock();
    request();
    lock.lock();
  }
}

}  // namespace tesserae::comm
