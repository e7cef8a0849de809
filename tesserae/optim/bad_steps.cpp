#include "tesserae/optim/bad_steps.h"

#include <ATen/ops/isfinite.h>

#include <cmath>

#include "tesserae/base/median.h"
#include "tesserae/comm/agree.h"
#include "tesserae/comm/rank_list.h"
#include "tesserae/offload/paged_tensor.h"

namespace tesserae::optim {
namespace {

// Losses of single steps are noisy: fewer would call noise a spike, more would lag behind a loss that falls.
constexpr size_t window = 32;
constexpr size_t fewest = 8;

bool all_finite(const at::Tensor& tensor) {
  return at::isfinite(tensor).all().item<bool>();
}

}  // namespace

std::string BadSteps::verdict(double loss, double norm, bool overflow_expected) const {
  if (!std::isfinite(loss)) return "the loss is not finite";
  if (!std::isfinite(norm)) return overflow_expected ? "" : "the gradients are not finite";
  if (!loss_spike_ || losses_.size() < fewest) return "";
  const double usual = median(losses_);
  if (loss - usual <= (*loss_spike_ - 1) * std::abs(usual)) return "";
  if (usual < 0) {
    return cat("the loss is ", loss, ", further above ", usual, ", the median of ", losses_.size(),
               " steps before, than ", *loss_spike_ - 1, " times its size");
  }
  return cat("the loss is ", loss, ", which is more than ", *loss_spike_, " times ", usual, ", the median of ",
             losses_.size(), " steps before");
}

void BadSteps::add(double loss, bool bad) {
  if (bad) {
    ++in_a_row_;
    return;
  }
  in_a_row_ = 0;
  if (!loss_spike_) return;
  if (losses_.size() == window) losses_.erase(losses_.begin());
  losses_.push_back(loss);
}

void BadSteps::went_back(int64_t rollbacks) {
  in_a_row_ = 0;
  rollbacks_ = rollbacks;
}

nlohmann::json BadSteps::description() const {
  return {{"losses", losses_}, {"in_a_row", in_a_row_}, {"rollbacks", rollbacks_}};
}

void BadSteps::take_over(const nlohmann::json& description) {
  losses_ = description.at("losses").get<std::vector<double>>();
  in_a_row_ = description.at("in_a_row");
  rollbacks_ = description.at("rollbacks");
}

std::string where_not_finite(comm::Fabric& fabric, double own_loss, const shard::ShardList& shards) {
  std::vector<int> ranks;
  const std::vector<double> losses = comm::from_all_ranks(fabric, own_loss);
  for (size_t rank = 0; rank < losses.size(); ++rank) {
    if (!std::isfinite(losses[rank])) ranks.push_back(static_cast<int>(rank));
  }
  if (ranks.size() == losses.size()) return "on all ranks";
  if (!ranks.empty()) return cat("on ", comm::rank_list(ranks));
  int64_t here = 0;
  std::string name;
  for (const shard::Shard& shard : shards) {
    if (!shard.grad.defined() || offload::is_paged(shard.grad) || all_finite(shard.grad)) continue;
    for (const shard::Slice& slice : shard.slices) {
      if (all_finite(shard.grad.slice(0, slice.begin, slice.end))) continue;
      if (here++ == 0) name = slice.name;
    }
  }
  const int first = comm::lowest_rank_with(fabric, here > 0);
  if (first < 0) return "";
  name = comm::text_of(fabric, here > 1 ? cat(name, " and ", here - 1, " more") : name, first);
  return cat(name, ", on rank ", first);
}

std::string judge(BadSteps& steps, comm::Fabric& fabric, double own_loss, double norm, bool overflow_expected) {
  const std::vector<double> sums = comm::sums_over_ranks(fabric, {own_loss, norm});
  const double loss = sums[0] / fabric.size();
  std::string why = steps.verdict(loss, sums[1] / fabric.size(), overflow_expected);
  steps.add(loss, !why.empty());
  if (why.empty() || fabric.size() == 1) return why;
  const std::string where = where_not_finite(fabric, own_loss, {});
  return where.empty() ? why : cat(why, " (", where, ")");
}

}  // namespace tesserae::optim
