#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/strategy.h"
#include "tesserae/model/gpt.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/shard/sharded.h"

namespace CLI {
class App;
}

namespace tesserae::bench {

/// What is trained, and on which batches. The names of its options are those of bench/peers.py.
struct TrainingOptions {
  model::GptConfig model;
  int64_t sequence = 128, batch = 1;
  std::string precision = "fp32";

  void add_to(CLI::App& app);
};

/// A transformer in training on one rank, with AdamW, on random tokens that are the same for every layout.
class Training {
 public:
  Training(const TrainingOptions& options, std::shared_ptr<comm::Fabric> fabric, const mesh::Strategy& strategy);

  at::Tensor forward();                     ///< on the next batch; the loss of this rank
  at::Tensor backward();                    ///< forward and backward; the loss, detached
  void update();                            ///< optimizer step and zero_grad
  at::Tensor step();                        ///< both
  int64_t steps() const { return steps_; }  ///< backwards so far

  comm::Fabric& fabric() { return *fabric_; }
  shard::Sharded& sharded() { return sharded_; }
  optim::AdamW& optimizer() { return optimizer_; }

  /// Each rank's value, by rank. A collective.
  std::vector<double> of_all_ranks(double value);
  double largest(double value);
  double sum(double value);

 private:
  const TrainingOptions& options_;
  std::shared_ptr<comm::Fabric> fabric_;
  model::Gpt model_;
  shard::Sharded sharded_;
  optim::AdamW optimizer_;
  int64_t steps_ = 0;
};

}  // namespace tesserae::bench
