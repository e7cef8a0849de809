#include "tesserae/optim/target.h"

#include <ATen/ops/zeros_like.h>

#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::optim {
namespace {

shard::ShardList list_of(std::vector<shard::Shard>& shards) {
  std::vector<shard::Shard*> list;
  for (auto& shard : shards) list.push_back(&shard);
  return shard::ShardList(std::move(list));
}

}  // namespace

void Target::sum_on_device(const at::Tensor& /*row*/) {
  throw InvalidArgument("Target::sum_on_device", "this target has no device (Target::device); use sum_over_chunks()");
}

at::Tensor Target::sum_on_host(const at::Tensor& row) {
  sum_on_device(row);
  return row.cpu();
}

LocalTarget::LocalTarget(std::vector<shard::Shard>& shards, std::function<void(int)> publish)
    : shards_(list_of(shards)), publish_(std::move(publish)) {}

at::Tensor LocalTarget::new_state(const shard::Shard& shard) {
  return at::zeros_like(shard.master);
}

void LocalTarget::publish(int index) {
  if (publish_) publish_(index);
}

void LocalTarget::update_later(int index, std::function<void()> update) {
  update();
  publish(index);
}

void LocalTarget::zero_grad() {
  for (auto& shard : shards_) shard.grad = at::Tensor();
}

std::shared_ptr<Target> target_of(std::vector<shard::Shard>& shards, std::function<void(int)> publish) {
  return std::make_shared<LocalTarget>(shards, std::move(publish));
}

}  // namespace tesserae::optim
