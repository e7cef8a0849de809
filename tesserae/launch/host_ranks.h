#pragma once

#include <vector>

#include "tesserae/launch/ending.h"
#include "tesserae/launch/launched_rank.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/launch/ranks_output.h"
#include "tesserae/launch/spare_ranks.h"
#include "tesserae/launch/waiting_ranks.h"

namespace tesserae::launch {

/// What a launcher has on its host, whether it decides on the job or follows another host's. Used from its thread.
struct HostRanks {
  explicit HostRanks(const LocalJob& wanted)
      : job(wanted), waiting(job.body ? job.ranks : 0, job.body), server(job, ending), spares(job, meeting, sources) {}

  /// Those of the job's start.
  void start_ranks() {
    for (int local = 0; local < job.ranks; ++local) {
      ranks.push_back(start_rank(job, {.rank = job.host * job.ranks + local, .local_rank = local}, meeting, sources));
    }
  }

  LocalJob job;          ///< `address` and `port` are those of the host that decides now
  WaitingRanks waiting;  ///< made before anything that a copy must not have
  Ending ending;
  ForkServer server;
  RankSources sources{waiting, server};
  Meeting meeting;
  SpareRanks spares;
  RanksOutput output;
  std::vector<LaunchedRank> ranks;  ///< of a launcher that decides, those of other hosts too
};

}  // namespace tesserae::launch
