#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/mesh/strategy.h"
#include "tesserae/model/config.h"
#include "tesserae/shard/options.h"

namespace tesserae::bench {

/// The command line of bench_step. What it shares with bench/peers.py has the same name there.
struct StepOptions {
  std::string mode = "sharded";  ///< or "plain": the model without the engine; no rank speaks to another
  int nproc = 0;                 ///< > 0: start so many ranks on this host
  int data_ranks = 0;            ///< > 0 (plain): one process trains on the batches of so many ranks together

  model::GptConfig model;
  int64_t sequence = 0, batch = 1;
  bool checkpoint_activations = false;
  bool whole_model = false;           ///< build the model in memory before it is sharded, not on the meta device
  bool offload_activations = false;   ///< out of the device between forward and backward
  int64_t activation_size = 1 << 20;  ///< bytes; what is smaller stays
  bool offload_state = false;         ///< parameters, gradients and optimizer state in memory of the host
  int threads = 1;                    ///< of a rank, on the host: an optimizer whose state is there uses them
  std::string scratch = ".";          ///< where activations of the host go

  std::string strategy = "FULL_SHARD";
  int degree = 0;
  std::vector<int> degrees;  ///< P, G, O: instead of a strategy by name
  bool keep_after_forward = false, keep_after_backward = false;
  std::string precision = "fp32";
  int limit_all_gathers = 2, limit_reductions = 2;
  std::string parameter_wire = "exact", gradient_wire = "exact";  ///< between hosts, see comm/wire.h

  std::string backend = "auto";  ///< or "gloo", "nccl", "staged", "null" (moves nothing), "local" (ranks are threads)
  int ranks = 1;                 ///< of null and local
  std::string device = "cpu";
  int steps = 5, warmup = 2;
  std::string json;

  mesh::Strategy strategy_of(int job_ranks) const;
  shard::Precision precision_of() const;
};

/// Fills `options`. Returns the exit status if the program ends here (--help, a mistake), else -1.
int parse(int argc, char** argv, StepOptions& options);

}  // namespace tesserae::bench
