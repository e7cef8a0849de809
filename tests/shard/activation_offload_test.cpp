#include "tesserae/shard/activation_offload.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

class ActivationOffloadTest : public ::testing::Test {
 protected:
  ~ActivationOffloadTest() override { std::filesystem::remove_all(folder_); }

  std::shared_ptr<offload::Activations> make_activations(int horizon) const {
    return offload::Activations::make({.horizon = horizon, .smallest = 1, .folder = folder_});
  }

  /// Trains with and without; everything is the same, to the bit. Returns what went out, of rank 0.
  offload::ActivationCounters expect_same_bits(Training run, const std::string& what, int horizon = 2,
                                               int ranks = 2) const {
    std::mutex mutex;
    offload::ActivationCounters counters;
    comm::run_local(ranks, [&](comm::Fabric& fabric) {
      run.attach = {};
      Training with = run;
      const auto activations = make_activations(horizon);
      with.attach = [&](Sharded& sharded) { offload_activations(sharded.engine(), activations); };
      const Reference expected = train_sharded(fabric, Training(run)), actual = train_sharded(fabric, with);
      const std::scoped_lock lock(mutex);
      EXPECT_EQ(actual.losses, expected.losses) << what;
      for (const auto& [name, value] : expected.parameters) {
        EXPECT_TRUE(at::equal(actual.parameters.at(name), value)) << what << ": " << name;
      }
      const auto own = activations->counters();
      EXPECT_GT(own.in, 0) << what;
      EXPECT_EQ(own.away, 0) << what;
      if (fabric.rank() == 0) counters = own;
    });
    return counters;
  }

 private:
  const std::string folder_ = cat(::testing::TempDir(), "tesserae-activation-offload-", ::getpid());
};

TEST_F(ActivationOffloadTest, ChangesNoBit) {
  const std::vector<std::pair<std::string, std::function<void(NetOptions&)>>> features = {
      {"plain", [](NetOptions&) {}},
      {"tied", [](NetOptions& net) { net.tied = true; }},
      {"nested", [](NetOptions& net) { net.nested = true; }},
      {"frozen", [](NetOptions& net) { net.frozen_block = 1; }},
      {"twice", [](NetOptions& net) { net.twice = 1; }},
      {"recomputed", [](NetOptions& net) { net.checkpoint = true; }},
      {"recomputed, nested, tied", [](NetOptions& net) { net.checkpoint = net.nested = net.tied = true; }},
      {"recomputed, twice", [](NetOptions& net) { net.checkpoint = true, net.twice = 1; }},
  };
  for (const auto& [name, change] : features) {
    for (const bool bf16 : {false, true}) {
      for (const mesh::Degrees degrees : {mesh::Degrees{2, 2, 2}, {1, 1, 2}}) {
        Training run;
        change(run.net);
        run.options.strategy = {degrees, true, true};
        if (bf16) run.options.precision = Precision::bf16();
        expect_same_bits(run, cat(name, bf16 ? ", bf16, " : ", fp32, ", to_string(degrees)));
      }
    }
  }
}

TEST_F(ActivationOffloadTest, ChangesNoBitOfAnAccumulation) {
  for (const auto accumulation : {Accumulation::local, Accumulation::two_hop}) {
    for (const bool recomputes : {false, true}) {
      Training run;
      run.micro = 2;
      run.net.checkpoint = recomputes;
      run.options.strategy = {{2, 2, 2}, true, true};
      run.options.accumulation = accumulation;
      expect_same_bits(run, "accumulation");
    }
  }
}

// Recomputed units save their inputs and nothing else. Of 5 blocks the horizon keeps what is needed at once: the head's
// inputs, which are the root's, and those of the last block.
TEST_F(ActivationOffloadTest, WhatLeavesIsKnownInAdvance) {
  Training run;
  run.net.blocks = 5;
  run.net.checkpoint = true;
  run.options.strategy = {{1, 1, 1}, true, true};
  const auto out_after = [&](int steps) {
    run.steps = steps;
    return expect_same_bits(run, "counted", /*horizon=*/2, /*ranks=*/1).out;
  };
  const int64_t input = 8 * 5 * run.net.dimension * 4;
  EXPECT_EQ(out_after(5) - out_after(4), 4 * input + 8 * 5 * 8 /* the tokens, which the embedding saves */);
}

TEST_F(ActivationOffloadTest, AStepThatThrewIsForgotten) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Net net{NetOptions{}};
    fill_all(*net);
    Options options;
    options.strategy = {{2, 2, 2}, true, true};
    Sharded sharded = shard_model(net, share(fabric), options);
    const auto activations = make_activations(2);
    offload_activations(sharded.engine(), activations);
    const auto gradient = [&] {
      const Batch batch = batch_of({}, 0, fabric.rank(), 2);
      net(batch.tokens, batch.targets).backward();
      const at::Tensor found = sharded.shards()[0].grad.clone();
      sharded.zero_grad();
      return found;
    };
    const at::Tensor expected = gradient();
    const Batch batch = batch_of({}, 0, fabric.rank(), 2);
    EXPECT_THROW(net(batch.tokens, batch.targets.narrow(2, 0, 5)), std::exception);
    EXPECT_TRUE(at::equal(gradient(), expected));
    const at::Tensor unused = net(batch.tokens, batch.targets);
    EXPECT_GT(activations->counters().away, 0);
    EXPECT_TRUE(at::equal(gradient(), expected));
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
