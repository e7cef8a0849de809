#include "tesserae/comm/call_log.h"

#include <utility>

namespace tesserae::comm {
namespace {

thread_local double waited = 0;
const std::shared_ptr<std::atomic<bool>>& waits_here() {
  thread_local const auto flag = std::make_shared<std::atomic<bool>>(false);
  return flag;
}

thread_local CallLog* logged_here = nullptr;

}  // namespace

double waited_by_this_thread() {
  return waited;
}

std::shared_ptr<const std::atomic<bool>> waiting_of_this_thread() {
  return waits_here();
}

Waiting::Waiting() : outermost_(!waits_here()->exchange(true, std::memory_order_relaxed)), begin_(os::now()) {}

Waiting::~Waiting() {
  if (!outermost_) return;
  waits_here()->store(false, std::memory_order_relaxed);
  waited += std::chrono::duration<double>(os::now() - begin_).count();
}

void CallLog::add(Call call) {
  const std::scoped_lock lock(mutex_);
  sent_[call.verb] += call.bytes;
  if (calls_.size() == capacity_) calls_.pop_front();
  calls_.push_back(std::move(call));
}

CallLog::Taken CallLog::take() {
  const std::scoped_lock lock(mutex_);
  const auto calls = std::exchange(calls_, {});
  return {.calls = {calls.begin(), calls.end()}, .sent = std::exchange(sent_, {})};
}

CallLog* CallLog::current() {
  return logged_here;
}

CallLog::Scope::Scope(CallLog* log) : before_(std::exchange(logged_here, log)) {}

CallLog::Scope::~Scope() {
  logged_here = before_;
}

}  // namespace tesserae::comm
