#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/cost/machine.h"
#include "tesserae/cost/memory.h"
#include "tesserae/cost/traffic.h"
#include "tesserae/cost/workload.h"
#include "tesserae/mesh/layout.h"

// What a model would need on a cluster, for every way to lay it out, before there is either: formulas, fed with what
// data sheets say of a machine or `tesserae probe` has measured. docs/plan.md states them; cost/ computes them.
namespace tesserae::plan {

/// Devices (or, where ranks share their host's memory, ranks) of one kind of machine, on hosts of the same size.
struct Cluster {
  int devices = 8;
  int per_host = 8;
  double headroom = 0.1;  ///< share of a place's memory that stays free: allocator, libraries, workspaces
  cost::Machine machine = cost::data_sheet("h100");  ///< its per_host is not used
};

struct Training {
  int64_t batch = 1024;  ///< sequences (of what is traced, rows) of one step, over all ranks
  /// Without `tensor`; micro_batch 0: of each layout what fits and is fastest; context 0: every C; expert 0: every E.
  cost::Execution run;
  std::string dtype = "bf16";  ///< that is computed in, of run.compute_bytes
  int reduce_bytes = 2, master_bytes = 4;
  double state_bytes = 8;  ///< of the optimizer for a parameter: AdamW 2 * master_bytes
  int gathers_at_once = 2, reductions_at_once = 2;
  bool free_after_forward = true;
  bool two_hop = true;  ///< gradients of an accumulation are kept in pieces over G, else whole
};

/// One way to lay the job out, and what it costs. Bytes of the fullest place, that is of a device, or of a host whose
/// ranks share its memory; `state` and `activations` are one rank's. Traffic: what a rank sends in a step.
struct Entry {
  int tensor = 1;           ///< T
  int context = 1;          ///< C, of the N
  int expert = 1;           ///< E, of the N, in another way
  int ranks = 1;            ///< N: of each tensor index, the ranks that shard state
  mesh::Degrees degrees;    ///< P, G, O over N; of experts over N / E, as mesh::limited says
  int64_t micro_batch = 1;  ///< sequences that a rank computes at once, and how often it does in a step
  int64_t micro_batches = 1;

  cost::RankMemory state;
  cost::Activations activations;
  double place_state = 0;        ///< of all ranks of the place, with what they share
  double place_activations = 0;  ///< the same
  double process = 0;            ///< and what their processes take beside the model
  double memory() const { return place_state + place_activations + process; }
  bool fits = false;

  cost::Traffic::Hop tensor_hop, context_hop, expert_hop;
  cost::Traffic data;
  double inside() const;   ///< bytes to ranks of the same host: hops none of whose groups spans hosts
  double between() const;  ///< bytes of all other hops

  // Seconds of a step.
  double compute = 0;
  double tensor_seconds = 0;     ///< nothing computes meanwhile
  double context_seconds = 0;    ///< the same
  double expert_seconds = 0;     ///< the same: tokens on their way to experts and back
  double data_seconds = 0;       ///< moving state, beside what computes
  double exposed_seconds = 0;    ///< of these, what that does not hide
  double optimizer_seconds = 0;  ///< nothing computes meanwhile
  double engine_seconds = 0;     ///< the same: gradients that are added up, and what else parameters cost
  double meeting_seconds = 0;    ///< waiting for each other
  double seconds() const {
    return compute + tensor_seconds + context_seconds + expert_seconds + exposed_seconds + optimizer_seconds +
           engine_seconds + meeting_seconds;
  }
};

/// All layouts, those that fit first, then by time; where time is equal, less that moves first, then less memory.
/// Throws InvalidArgument for a cluster, model or batch of which there is no layout, naming the nearest batch.
std::vector<Entry> make_plan(const cost::Workload& workload, const Training& training, const Cluster& cluster);

/// The configuration with `layers`, `dimension` and `vocabulary` that has about `parameters` parameters: heads of 128
/// features unless there are some, and as wide a feed-forward layer as is left. Throws InvalidArgument.
model::GptConfig model_of(double parameters, model::GptConfig shape);

}  // namespace tesserae::plan
