#pragma once

#include <chrono>
#include <optional>
#include <vector>

namespace tesserae::comm {

/// Which ranks are alive and let others wait: those that were in no operation whenever one looked, since some deadline
/// has passed. What one sees is handed in, with its time. Of one thread.
class AbsentRanks {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// `ranks`: of the job. `pause`: the longest time between two looks at one question; after a longer one another
  /// begins.
  AbsentRanks(int ranks, std::chrono::milliseconds pause) : job_(ranks), pause_(pause) {}

  /// For how long one looks after a deadline, which may be short, or hours.
  static std::chrono::milliseconds confirmation(std::chrono::milliseconds deadline);

  /// `others`: the ranks that live, but for this one. `idle`: those of them that are in no operation; unset: it could
  /// not be asked. Who is absent; nothing while that cannot be told yet: who comes late comes meanwhile, and waits.
  /// Nobody where all wait, where more than half of the job are in no operation (something else keeps them), or where
  /// nobody can be asked in the end.
  std::optional<std::vector<int>> look(const std::vector<int>& others, const std::optional<std::vector<int>>& idle,
                                       std::chrono::milliseconds deadline, TimePoint now);

 private:
  const int job_;
  const std::chrono::milliseconds pause_;
  std::vector<int> suspects_;  // in no operation at each look ...
  TimePoint since_;            // ... since this one
  TimePoint seen_;             // the last look
};

}  // namespace tesserae::comm
