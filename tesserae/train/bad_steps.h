#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/config/config.h"
#include "tesserae/shard/shard.h"

namespace tesserae::train {

/// Steps were so bad that the run has ended, as `bad_steps` of its configuration asks.
class BadNumbers : public Error {
 public:
  using Error::Error;
};

/// Which steps are bad: those whose loss or gradients are not finite, and those whose loss is a spike, which is a loss
/// above `loss_spike` times the median of the last good ones. A part of the training state: what it knows is told from
/// sums over all ranks, so it is the same on all of them, and a run that is continued judges as if it had gone on.
class BadSteps {
 public:
  explicit BadSteps(const config::Config::BadSteps& options) : options_(options) {}

  /// Why a step of that mean loss and gradient norm is bad; empty: it is good. `overflow_expected`: a loss scaler is
  /// still above its lowest scale, so gradients that are not finite say nothing.
  std::string verdict(double loss, double norm, bool overflow_expected) const;
  /// A step is over that had such a verdict.
  void add(double loss, bool bad);
  /// The run went back because of a bad step.
  void went_back(int64_t rollbacks);

  int64_t in_a_row() const { return in_a_row_; }    ///< bad steps, since the last good one
  int64_t rollbacks() const { return rollbacks_; }  ///< of this run

  /// What a checkpoint keeps; and the reverse. Throws a JSON exception for what description() does not say.
  nlohmann::json description() const;
  void take_over(const nlohmann::json& description);

 private:
  const config::Config::BadSteps options_;
  std::vector<double> losses_;  // of the last good steps, the oldest first
  int64_t in_a_row_ = 0;
  int64_t rollbacks_ = 0;
};

/// Whose loss, or else which parameters' gradients are not finite, as people read it; empty: nobody's. Collective.
/// `own_loss`: of this rank's data; `shards` with the gradients of the step.
std::string where_not_finite(comm::Fabric& fabric, double own_loss, const shard::ShardList& shards);

}  // namespace tesserae::train
