#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/shard/shard.h"

namespace tesserae::optim {

/// Steps were so bad that training has ended, as whoever trains has asked for.
class BadNumbers : public Error {
 public:
  using Error::Error;
};

/// Which steps are bad: those whose loss or gradients are not finite, and those whose loss is a spike, which is a loss
/// above `loss_spike` times the median of the last good ones (unset: nothing is a spike). A part of the training state:
/// what it knows is told from sums over all ranks, so it is the same on all of them, and a run that is continued judges
/// as if it had gone on.
class BadSteps {
 public:
  explicit BadSteps(std::optional<double> loss_spike) : loss_spike_(loss_spike) {}

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
  const std::optional<double> loss_spike_;
  std::vector<double> losses_;  // of the last good steps, the oldest first
  int64_t in_a_row_ = 0;
  int64_t rollbacks_ = 0;
};

/// Whose loss, or else which parameters' gradients are not finite, as people read it; empty: nobody's. Collective.
/// `own_loss`: of this rank's data; `shards` with the gradients of the step, or none.
std::string where_not_finite(comm::Fabric& fabric, double own_loss, const shard::ShardList& shards);

/// The verdict on a step of which this rank knows its loss and the norm of the gradients, the same on all ranks, with
/// the ranks whose loss is not finite; `steps` has heard of it. Collective.
std::string judge(BadSteps& steps, comm::Fabric& fabric, double own_loss, double norm, bool overflow_expected);

}  // namespace tesserae::optim
