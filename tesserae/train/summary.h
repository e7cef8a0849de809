#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/config/json.h"
#include "tesserae/dial/dial.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/offload/activations.h"
#include "tesserae/shard/statistics.h"
#include "tesserae/train/checkpointing.h"
#include "tesserae/train/metrics.h"
#include "tesserae/train/restore.h"

namespace tesserae::train {

/// What the summary of a run says beside its figures.
struct RunFacts {
  mesh::Mesh mesh{1};          ///< of the job
  mesh::Layout layout{1, {}};  ///< of the ranks that shard state
  int hosts = 1;
  int64_t parameters = 0;
  int64_t tokens_per_step = 0;
  std::string device, precision;
  double seconds = 0;                 ///< from the first step's begin to the end of the last, evaluation included
  std::vector<uint64_t> peak_memory;  ///< by rank: the most memory that was ever resident
  uint64_t memory_sum = 0;            ///< at the end, over all ranks, pages that ranks share counted once
  uint64_t bytes_sent = 0;            ///< by rank 0
  shard::Statistics engine;           ///< of rank 0
  int stopped_by = 0;                 ///< the signal that ended the run early, or 0; SIGTERM for a file or a command
  std::string stop_reason;            ///< who asked, as people read it
  std::string broken_off;             ///< why the run ended early by itself; empty: it did not
  std::optional<Origin> origin;       ///< what this process continued
  config::Json recoveries = config::Json::array();  ///< each: epoch, ranks that were lost, step, from what, seconds
  config::Json scalings = config::Json::array();    ///< each: step, from, to (ranks), seconds
  config::Json sharings = config::Json::array();    ///< of experts; each: step, from, to (ranks), seconds
  config::Json bad_steps = config::Json::array();   ///< each: step, why, policy, and to which step it went back, if so
  config::Json differing_replicas = config::Json::array();  ///< each: step, and what differed on which ranks
  dial::Dial::Figures dial;                                 ///< changes of degrees
  std::optional<offload::ActivationCounters> activations;   ///< of rank 0; unset: they stay where they are
  std::optional<Checkpointing::Figures> checkpoints;        ///< of this process; unset: none were asked for
};

/// summary.json. "peak_memory_bytes" is that of the rank that used most.
config::Json make_summary(const RunFigures& figures, const RunFacts& facts);

}  // namespace tesserae::train
