#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/os/clock.h"

namespace tesserae::comm {

/// Seconds for which the calling thread has waited for other ranks since it began: in verbs of groups, and for tickets
/// of lanes. What a verb itself copies and adds counts, too; on a device the host hardly waits.
double waited_by_this_thread();
/// Whether it waits at this moment, for others to look at, also once it has ended.
std::shared_ptr<const std::atomic<bool>> waiting_of_this_thread();

/// From its making to its end the calling thread waits. One within another counts once.
class Waiting {
 public:
  Waiting();
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  bool outermost_;
  os::TimePoint begin_;
};

/// A verb of a group, as a lane carried it; on a device, as the host queued it.
struct Call {
  std::string_view verb;  ///< of static life
  std::string unit;       ///< Label::unit
  uint64_t bytes = 0;     ///< that left this rank
  os::TimePoint begin, end;
};

/// The newest calls of a lane (Lane::log_calls), and what all of them have sent. Thread-safe.
class CallLog {
 public:
  explicit CallLog(size_t capacity = 1024) : capacity_(capacity) {}

  struct Taken {
    std::vector<Call> calls;                    ///< oldest first
    std::map<std::string_view, uint64_t> sent;  ///< bytes by verb: also of calls for which there was no room
  };

  void add(Call call);
  /// What has come since the last call of this function.
  Taken take();

  /// The log of the lane whose task this thread is running; null in any other.
  static CallLog* current();
  /// Makes it that, to its end.
  class Scope {
   public:
    explicit Scope(CallLog* log);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CallLog* before_;
  };

 private:
  size_t capacity_;
  std::mutex mutex_;
  std::deque<Call> calls_;
  std::map<std::string_view, uint64_t> sent_;
};

}  // namespace tesserae::comm
