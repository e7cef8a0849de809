#include "tesserae/shard/replica_check.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "tesserae/shard/engine.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// One number for each of a master: an optimizer's state.
class Kept : public Companion {
 public:
  explicit Kept(Sharded& sharded) {
    for (const Shard& shard : sharded.shards()) values.push_back(at::full_like(shard.master, 0.5));
    handle_ = sharded.engine().add_companion(*this);
  }
  std::vector<c10::ScalarType> dtypes(const Shard& /*shard*/) override { return {at::kFloat}; }
  std::vector<at::Tensor> take(const Shard& shard) override {
    return {std::exchange(values[static_cast<size_t>(shard.index)], {})};
  }
  void put(const Shard& shard, std::vector<at::Tensor> tensors) override {
    values[static_cast<size_t>(shard.index)] = std::move(tensors.front());
  }

  std::vector<at::Tensor> values;

 private:
  std::shared_ptr<void> handle_;
};

/// A rank's model after two steps.
struct OneOfSeveral {
  OneOfSeveral(comm::Fabric& fabric, const mesh::Strategy& strategy, NetOptions of = {}) : net(of) {
    fill_all(*net);
    Options options;
    options.strategy = strategy;
    sharded.emplace(shard_model(net, share(fabric), options));
    for (int64_t step = 0; step < 2; ++step) {
      const Batch batch = batch_of(net->options, step, fabric.rank(), fabric.size());
      net(batch.tokens, batch.targets).backward();
      sgd(*sharded, 0.1);
    }
    kept.emplace(*sharded);
  }
  /// Changes the lowest bit of the first element of a parameter that this rank holds any of; which it was.
  std::string flip(std::vector<at::Tensor>* of = nullptr) {
    for (Shard& shard : sharded->shards()) {
      if (shard.slices.empty()) continue;
      const at::NoGradGuard no_grad;
      at::Tensor flat = of != nullptr ? (*of)[static_cast<size_t>(shard.index)] : shard.master;
      auto* const bits = flat.view(at::kInt).data_ptr<int32_t>() + shard.slices.front().begin;
      *bits ^= 1;
      return shard.slices.front().name;
    }
    return "nothing";
  }

  Net net;
  std::optional<Sharded> sharded;
  std::optional<Kept> kept;
};

mesh::Strategy degrees(int parameters, int gradients, int optimizer) {
  mesh::Strategy strategy;
  strategy.degrees = {.parameters = parameters, .gradients = gradients, .optimizer = optimizer};
  return strategy;
}

TEST(ReplicaCheck, ReplicasAgreeAfterSteps) {
  for (const mesh::Strategy& strategy : {degrees(1, 1, 1), degrees(2, 2, 2), degrees(1, 1, 2), degrees(4, 4, 4)}) {
    comm::run_local(4, [&](comm::Fabric& fabric) {
      OneOfSeveral trained(fabric, strategy, {.tied = true, .frozen_block = 1});
      const ReplicaReport report = trained.sharded->compare_replicas();
      EXPECT_THAT(report.suspects, IsEmpty()) << report.text;
      EXPECT_TRUE(report.decided);
      EXPECT_EQ(has_replicas(trained.sharded->engine()), strategy.degrees.optimizer < 4);
    });
  }
}

TEST(ReplicaCheck, OfThreeAndMoreTheOddOneIsNamedAndFilledAnew) {
  comm::run_local(4, [](comm::Fabric& fabric) {
    OneOfSeveral trained(fabric, degrees(1, 1, 1));
    const Values before = [&] {
      Values values;
      trained.sharded->visit_parameters(
          [&](const std::string& name, const at::Tensor& v) { values[name] = v.clone(); });
      return values;
    }();
    if (fabric.rank() == 2) trained.flip();
    const ReplicaReport report = trained.sharded->compare_replicas();
    EXPECT_TRUE(report.decided);
    EXPECT_THAT(report.suspects, ElementsAre(2));
    EXPECT_THAT(report.text, HasSubstr("rank 2: "));
    const std::vector<bool> whole = {true, true, false, true};
    ASSERT_TRUE(trained.sharded->can_fill(whole));
    trained.sharded->fill(whole);
    EXPECT_THAT(trained.sharded->compare_replicas().suspects, IsEmpty());
    trained.sharded->visit_parameters(
        [&](const std::string& name, const at::Tensor& value) { EXPECT_TRUE(value.equal(before.at(name))) << name; });
  });
}

TEST(ReplicaCheck, OfTwoNobodyKnowsWhich) {
  comm::run_local(4, [](comm::Fabric& fabric) {
    OneOfSeveral trained(fabric, degrees(2, 2, 2));
    std::string name;
    if (fabric.rank() == 3) name = trained.flip();
    const ReplicaReport report = trained.sharded->compare_replicas();
    EXPECT_FALSE(report.decided);
    EXPECT_THAT(report.suspects, ElementsAre(1, 3));
    if (fabric.rank() == 3) EXPECT_THAT(report.text, HasSubstr(cat("rank 3: ", name)));
  });
}

TEST(ReplicaCheck, TheOptimizersStateCountsAndPaddingDoesNot) {
  comm::run_local(3, [](comm::Fabric& fabric) {
    OneOfSeveral trained(fabric, degrees(1, 1, 1));
    for (Shard& shard : trained.sharded->shards()) {
      const at::NoGradGuard no_grad;
      if (fabric.rank() == 0) shard.master.slice(0, shard.slices.back().end, shard.master.numel()).fill_(7);
    }
    EXPECT_THAT(trained.sharded->compare_replicas().suspects, IsEmpty());
    std::string name;
    if (fabric.rank() == 1) name = trained.flip(&trained.kept->values);
    const ReplicaReport report = trained.sharded->compare_replicas();
    EXPECT_THAT(report.suspects, ElementsAre(1));
    if (fabric.rank() == 1) EXPECT_EQ(report.text, cat("rank 1: ", name));
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
