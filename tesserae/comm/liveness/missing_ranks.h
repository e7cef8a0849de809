#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/comm/liveness/absent_ranks.h"
#include "tesserae/comm/liveness/asked_store.h"
#include "tesserae/comm/liveness/pulses.h"
#include "tesserae/comm/liveness/verdict.h"

namespace tesserae::comm {

/// For whom an operation has waited whose deadline has passed: ranks that do not beat (they are silent), else those
/// that beat and let others wait (they are absent). Reads the store's beats and who waits. Of one thread.
class MissingRanks {
 public:
  /// `rank`: this one, which is never missing. `server`: the rank that serves the store, or -1. `beat`: the interval.
  MissingRanks(AskedStore& store, int ranks, int rank, int server, std::chrono::milliseconds beat)
      : store_(store), rank_(rank), server_(server), pulses_(beat), absent_(ranks, Pulses::silence + 2 * beat) {}

  /// Those of `ranks` that are silent: the one that serves the store, as long as that cannot be asked. Nothing while it
  /// cannot be told yet of one of them.
  std::optional<std::vector<int>> silent_of(std::vector<int> ranks);
  bool has_been_still(int rank, std::chrono::milliseconds time) const;

  /// The verdict on an operation of `members`, with `text`. `living`: the ranks of the job that are neither lost nor
  /// have left. Nothing while it cannot be told yet who lives, and who waits.
  std::optional<Verdict> verdict(const std::vector<int>& members, const std::vector<int>& living,
                                 const std::string& text, std::chrono::milliseconds deadline);

  /// Another rank is the one that serves the store, and does not answer for now.
  bool server_is_silent() const { return store_.stalls() && server_ >= 0 && server_ != rank_; }

 private:
  AskedStore& store_;
  const int rank_, server_;
  Pulses pulses_;
  AbsentRanks absent_;
};

}  // namespace tesserae::comm
