#pragma once

#include <cstdint>

namespace tesserae::comm {

/// What a group or a fabric has done so far. Bytes are those that left this rank (for null: would have left).
struct Counters {
  struct Verb {
    uint64_t calls = 0;
    uint64_t bytes = 0;
  };
  Verb all_gather, reduce_scatter, all_reduce, broadcast, exchange, barrier;

  uint64_t calls() const;
  uint64_t bytes() const;
  Counters& operator+=(const Counters& other);
};

}  // namespace tesserae::comm
