#include "tesserae/shard/step_observer.h"

#include <ATen/ops/allclose.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::HasSubstr;

class Reducer : public StepObserver {
 public:
  bool reduces() const override { return true; }
};

std::string refusal(comm::Fabric& fabric, const Options& options, int reducers) {
  const NetOptions shape{.blocks = 1};
  Net net(shape);
  fill_all(*net);
  Sharded sharded = shard_model(net, share(fabric), options);
  try {
    for (int i = 0; i < reducers; ++i) sharded.engine().root().attach(std::make_shared<Reducer>());
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(StepObserver, AReducerIsRefusedWhereItCannotStandForAllHops) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Options options{.strategy = mesh::preset("FULL_SHARD", 2)};
    EXPECT_EQ(refusal(fabric, options, 1), "");
    EXPECT_THAT(refusal(fabric, options, 2), HasSubstr("has a hook in place of its reduction already"));
    // What no_sync() kept over G would be lost: the reducer starts from whole gradients.
    options.accumulation = Accumulation::two_hop;
    EXPECT_THAT(refusal(fabric, options, 1), HasSubstr("two_hop"));
    options.accumulation = Accumulation::local;
    options.strategy = mesh::preset("ZERO_1", 2);
    EXPECT_THAT(refusal(fabric, options, 1), HasSubstr("all three degrees must be 1 or 2"));
  });
}

/// Sums as the engine would, but for the first time.
class FailsOnce : public StepObserver {
 public:
  explicit FailsOnce(comm::Fabric& fabric) : group_(fabric.everyone()) {}
  bool reduces() const override { return true; }
  void reduce(const at::Tensor& whole, const at::Tensor&) override {
    if (std::exchange(fresh_, false)) throw std::runtime_error("a hook with a bug");
    group_.all_reduce(whole);
    whole.div_(group_.size());
  }

 private:
  comm::Group& group_;
  bool fresh_ = true;
};

TEST(StepObserver, WhatAReducerThrowsEndsItsBackwardAndNoLaterOne) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    const NetOptions shape{.blocks = 1};
    const auto gradients = [&](bool fails) {
      Net net(shape);
      fill_all(*net);
      Sharded sharded = shard_model(net, share(fabric), {.strategy = mesh::preset("NO_SHARD", 2)});
      const Batch batch = batch_of(shape, 0, fabric.rank(), 2);
      const auto backward = [&] { net(batch.tokens, batch.targets).backward(); };
      if (fails) {
        for (const auto& unit : sharded.engine().units()) unit->attach(std::make_shared<FailsOnce>(fabric));
        EXPECT_THROW(backward(), std::runtime_error);
        sharded.zero_grad();
      }
      backward();
      std::vector<at::Tensor> found;
      for (const Shard& shard : sharded.shards()) found.push_back(shard.grad.clone());
      return found;
    };
    const auto wanted = gradients(false), got = gradients(true);
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], wanted[i], 1e-5, 1e-7));
  });
}

/// Twice the average, or an error.
class Adjuster : public StepObserver {
 public:
  explicit Adjuster(bool fails = false) : fails_(fails) {}
  bool adjusts() const override { return true; }
  void adjust(const at::Tensor& average) override {
    if (std::exchange(fails_, false)) throw std::runtime_error("a hook with a bug");
    average.mul_(2);
  }

 private:
  bool fails_;
};

TEST(StepObserver, AnAdjusterSeesEachAverageOnceBeforeItIsAdded) {
  for (const char* strategy : {"NO_SHARD", "ZERO_1", "SHARD_GRAD_OP", "FULL_SHARD"}) {
    comm::run_local(2, [strategy](comm::Fabric& fabric) {
      const NetOptions shape{.blocks = 1};
      const auto gradients = [&](int attached, bool fails) {
        Net net(shape);
        fill_all(*net);
        Sharded sharded = shard_model(net, share(fabric), {.strategy = mesh::preset(strategy, 2)});
        for (const auto& unit : sharded.engine().units()) {
          if (attached > 0) unit->attach(std::make_shared<Adjuster>(fails));
        }
        if (attached > 1) {
          EXPECT_THROW(sharded.engine().root().attach(std::make_shared<Adjuster>()), InvalidArgument);
        }
        const auto backward = [&](int step) {
          const Batch batch = batch_of(shape, step, fabric.rank(), 2);
          net(batch.tokens, batch.targets).backward();
        };
        if (fails) {
          EXPECT_THROW(backward(0), std::runtime_error);
          sharded.zero_grad();
        }
        for (const int step : {0, 1}) backward(step);  // the second is added to the first
        std::vector<at::Tensor> found;
        for (const Shard& shard : sharded.shards()) found.push_back(shard.grad.clone());
        return found;
      };
      const auto plain = gradients(0, false), twice = gradients(2, false), later = gradients(1, true);
      ASSERT_EQ(plain.size(), twice.size());
      for (size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(at::allclose(twice[i], plain[i] * 2, 1e-5, 1e-7)) << strategy;
        EXPECT_TRUE(at::allclose(later[i], plain[i] * 2, 1e-5, 1e-7)) << strategy;
      }
    });
  }
}

}  // namespace
}  // namespace tesserae::shard::testing
