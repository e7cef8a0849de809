#pragma once

#include <atomic>
#include <cstdint>

namespace tesserae::comm {

/// A number that one thread adds to, while others may read it: lanes go on while a step's facts are taken down.
class Count {
 public:
  Count(uint64_t value = 0) : value_(value) {}  // NOLINT(google-explicit-constructor): it is a number
  Count(const Count& other) : value_(other) {}
  Count& operator=(const Count& other) {
    value_.store(other, std::memory_order_relaxed);
    return *this;
  }
  operator uint64_t() const { return value_.load(std::memory_order_relaxed); }  // NOLINT(google-explicit-constructor)
  Count& operator+=(uint64_t more) { return *this = *this + more; }

 private:
  std::atomic<uint64_t> value_;
};

/// What a group or a fabric has done so far. Bytes are those that left this rank (for null: would have left).
struct Counters {
  struct Verb {
    Count calls;
    Count bytes;
  };
  Verb all_gather, reduce_scatter, all_reduce, broadcast, exchange, barrier;

  uint64_t calls() const;
  uint64_t bytes() const;
  Counters& operator+=(const Counters& other);
};

}  // namespace tesserae::comm
