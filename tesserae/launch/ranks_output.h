#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tesserae/launch/launched_rank.h"
#include "tesserae/launch/spare_ranks.h"

namespace tesserae::launch {

/// What a launcher and the ranks of its host write on this process's standard error, line by line. Used from the
/// launcher's thread.
class RanksOutput {
 public:
  RanksOutput();

  /// A line of the launcher's own.
  void print(const std::string& line) const;
  /// Waits until a rank or a spare has written something or `signals` can be read (-1: there is none), a moment at
  /// most, and passes on what there is.
  void wait(std::vector<LaunchedRank>& ranks, SpareRanks& spares, int signals);
  /// Passes on what a rank that has ended has left. Something that it started may have its pipe still: nothing waits
  /// for that.
  void drain(LaunchedRank& rank);

  /// What other ranks write is withheld from now on: it is about this one's loss, and would bury the cause.
  void show_only(const LaunchedRank& rank);
  void show_none() { shown_ = nobody; }
  /// The last lines of this rank, unless they are the last that was shown.
  void repeat(const LaunchedRank& rank) const;

 private:
  static constexpr pid_t nobody = -1;

  void read(LaunchedRank& rank);

  const bool live_screen_;
  std::optional<pid_t> shown_;  // unset: all
  pid_t last_speaker_ = nobody;
};

}  // namespace tesserae::launch
