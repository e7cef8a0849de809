#pragma once

namespace tesserae::cost {

/// What carries bytes, for each rank while all ranks use it. Bytes and seconds.
struct Links {
  double inside = 5e9;                                   ///< bytes/s that a rank sends to ranks of its host
  double between = 1e9;                                  ///< the same to other hosts
  double inside_latency = 2e-5, between_latency = 1e-4;  ///< of one collective
  double memory = 1e10;                                  ///< bytes/s that a rank reads or writes in its own memory

  bool operator==(const Links&) const = default;
};

}  // namespace tesserae::cost
