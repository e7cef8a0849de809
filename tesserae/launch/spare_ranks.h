#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tesserae/launch/launched_rank.h"
#include "tesserae/os/clock.h"

namespace tesserae::launch {

/// Processes of this host that wait for a place in the job, with all done that needs none (comm::Membership). Ended
/// with this object. Used from the launcher's thread.
class SpareRanks {
 public:
  /// All of it outlives it. Spares know of the meeting only where its store is.
  SpareRanks(const LocalJob& job, const Meeting& meeting, const RankSources& sources);

  /// Starts what is missing of so many, and of LocalJob::spares, once the last pause is over; ends those that are too
  /// many. If one cannot be started it says so, and tries again after a pause.
  void keep(int needed);
  /// None is started for LocalJob::spare_pause.
  void pause();

  struct Spare {
    int64_t number = 0;  ///< over all hosts: by it its place is given
    LaunchedRank process;
  };
  /// One that still lives, for this place.
  std::optional<Spare> take(const Place& place);

  void add_outputs(std::vector<int>& descriptors) const;
  /// What one of them has written there.
  std::vector<std::string> read(int descriptor);

 private:
  const LocalJob& job_;
  const Meeting& meeting_;
  const RankSources& sources_;
  std::vector<Spare> spares_;  // a few
  int64_t next_number_;
  std::optional<os::Deadline> paused_until_;
};

}  // namespace tesserae::launch
