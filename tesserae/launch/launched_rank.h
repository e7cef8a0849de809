#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/launch/fork_server.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/launch/line_reader.h"
#include "tesserae/launch/waiting_ranks.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/process.h"

namespace tesserae::launch {

/// Where ranks meet, when, and how many of the job.
struct Meeting {
  uint16_t port = 0;
  std::optional<int> epoch = {};  ///< unset: there is one meeting, and rank 0 serves the store
  int ranks = 0;
};

/// Which rank of the job a process is to be, and which of its host: that chooses its accelerator.
struct Place {
  int rank = 0, local_rank = 0;
};

/// A rank as its launcher has it: a process, what it writes, and how it ended. Used from the launcher's thread.
struct LaunchedRank {
  std::optional<os::Process> process;  ///< unset: its host's launcher has it
  os::Descriptor output;
  LineReader lines;
  std::deque<std::string> last;  ///< its last lines, for the report
  std::optional<os::Exit> exit;
  std::string name;           ///< of the process: no other of the job has it
  bool asked_to_end = false;  ///< it ran when its launcher, which follows the first host's, was asked to end
  bool is_missing = false;    ///< others waited for it to their deadline: it was killed
  int host = 0, local_rank = 0;
  int rank = 0;    ///< of the job
  int number = 0;  ///< of the process, over all hosts: those of the job's start are numbered as its ranks

  /// What can be read of it at once; at the end of its output what has no end of line.
  std::vector<std::string> read();
  bool is_running() const { return !exit; }
  /// Of one that has ended: it has done its work, or returned LocalJob::early_exit_code.
  bool ended_well(const LocalJob& job) const;
};

/// What ranks of this host are copies of, before they are processes of the job's command.
struct RankSources {
  WaitingRanks& waiting;
  ForkServer& server;
};

/// Starts a rank on this host with the variables that torchrun sets. `spare`: it has no place yet, and waits for one
/// under this number. Throws IoError.
LaunchedRank start_rank(const LocalJob& job, const Place& place, const Meeting& meeting, const RankSources& sources,
                        std::optional<int64_t> spare = std::nullopt);

/// The variables that are the same for all ranks of this host, beside those that it has itself.
std::map<std::string, std::string> environment_of_all(const LocalJob& job);

}  // namespace tesserae::launch
