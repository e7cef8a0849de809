#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace tesserae::comm {

/// Which ranks beat. Each adds to a counter of its own every `beat`, and one looks at some of them now and then: what
/// one sees is handed in, with its time. Of one thread.
class Pulses {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// A rank that has not beaten for this long, and two beats, is silent: a busy machine may hold a thread up for a
  /// second.
  static constexpr std::chrono::milliseconds silence{3000};

  explicit Pulses(std::chrono::milliseconds beat) : slack_(2 * beat) {}

  /// The counters of `ranks` are `beats` now. Which of them are silent; nothing while that cannot be told yet of one:
  /// it has neither been still for long enough nor beaten between two looks in short order.
  std::optional<std::vector<int>> look(const std::vector<int>& ranks, const std::vector<int64_t>& beats, TimePoint now);

  /// Whether that rank was looked at, and has not beaten for so long since.
  bool still_for(std::chrono::milliseconds time, int rank, TimePoint now) const;

 private:
  struct Pulse {
    int64_t beats = 0;
    TimePoint sampled;  // when it was looked at last
    TimePoint changed;  // when `beats` was seen for the first time
    TimePoint alive;    // when it was seen to change between two looks in short order
  };
  const std::chrono::milliseconds slack_;
  std::map<int, Pulse> pulses_;
};

}  // namespace tesserae::comm
