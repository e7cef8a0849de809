#include "tesserae/comm/sub_fabric.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/mesh/world.h"

namespace tesserae::comm {
namespace {

class SubFabric final : public Fabric {
 public:
  SubFabric(std::shared_ptr<Fabric> whole, const std::vector<int>& members)
      : whole_(std::move(whole)), members_(members), world_(mesh::world_of(whole_->world(), members)) {}

  void leave() override { whole_->leave(); }
  int epoch() const override { return whole_->epoch(); }
  const mesh::World& world() const override { return world_; }
  c10::Device device() const override { return whole_->device(); }

  Group& group(const std::vector<int>& ranks, Traffic traffic) override {
    std::vector<int> job_ranks;
    for (const int rank : ranks) {
      if (rank < 0 || rank >= world_.size()) {
        throw InvalidArgument("Fabric::group", cat("rank ", rank, " of a fabric of ", world_.size(), " ranks"));
      }
      job_ranks.push_back(members_[static_cast<size_t>(rank)]);
    }
    Group& group = whole_->group(job_ranks, traffic);
    const std::lock_guard lock(mutex_);
    if (std::exchange(epoch_, whole_->epoch()) != whole_->epoch()) counted_.clear();
    counted_.insert(group.shared_counters());
    return group;
  }

  Lane& lane(Traffic traffic) override { return whole_->lane(traffic); }

  Counters counters() const override {
    const std::lock_guard lock(mutex_);
    Counters sum;
    if (epoch_ != whole_->epoch()) return sum;
    for (const auto& counters : counted_) sum += *counters;
    return sum;
  }

 protected:
  GroupTable* table() const override { return table_of(*whole_); }
  std::vector<int> lost() const override {
    std::vector<int> ranks = lost_of(*whole_);
    std::erase_if(ranks, [this](int rank) { return std::ranges::find(members_, rank) == members_.end(); });
    return ranks;
  }

 private:
  std::shared_ptr<Fabric> whole_;
  std::vector<int> members_;
  mesh::World world_;
  mutable std::mutex mutex_;  // counters() may be asked from another thread, for a progress line
  std::set<std::shared_ptr<const Counters>> counted_;  // of groups, some of which may have ended
  int epoch_ = 0;                                      // of those
};

}  // namespace

std::shared_ptr<Fabric> sub_fabric(std::shared_ptr<Fabric> whole, const std::vector<int>& members) {
  if (whole == nullptr) throw InvalidArgument("sub_fabric", "the whole fabric is null; see comm::Fabric::connect");
  auto part = std::make_shared<SubFabric>(whole, members);
  return part->size() == whole->size() ? std::move(whole) : std::move(part);
}

}  // namespace tesserae::comm
