#include "tesserae/shard/schedule.h"

#include <algorithm>

namespace tesserae::shard {

void Schedule::restart() {
  current_.clear();
  cursor_ = 0;
}

bool Schedule::use(Use use) {
  if (current_.size() < most) current_.push_back(use);
  if (cursor_ < record_.size() && record_[cursor_] == use) {
    ++cursor_;
    return true;
  }
  const auto next =
      std::find(record_.begin() + static_cast<int64_t>(std::min(cursor_, record_.size())), record_.end(), use);
  if (next != record_.end()) cursor_ = static_cast<size_t>(next - record_.begin()) + 1;
  return record_.empty();
}

void Schedule::finish() {
  if (current_ != record_) record_ = current_;
  restart();
}

void Schedule::upcoming(int count, std::vector<Use>& out) const {
  out.clear();
  for (size_t i = cursor_; i < record_.size() && static_cast<int>(out.size()) < count; ++i) out.push_back(record_[i]);
}

bool Schedule::needs_soon(int unit, int count) const {
  const size_t end = std::min(record_.size(), cursor_ + static_cast<size_t>(count));
  for (size_t i = cursor_; i < end; ++i) {
    if (record_[i].unit == unit) return true;
  }
  return false;
}

}  // namespace tesserae::shard
