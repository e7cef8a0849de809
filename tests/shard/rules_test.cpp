// The rules of docs/design.md that a user can run into.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <thread>

#include "tesserae/base/error.h"
#include "tesserae/comm/error.h"
#include "tesserae/shard/engine.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<comm::Fabric> null_of(int ranks) {
  return comm::Fabric::null(mesh::World::single_host(0, ranks));
}

at::Tensor loss_of(Net& net, int64_t step = 0, int rank = 0, int ranks = 1) {
  const Batch batch = batch_of(net->options, step, rank, ranks);
  return net(batch.tokens, batch.targets);
}

TEST(Rules, AParameterReadWhileShardedNamesItsUnitAndTheWayOut) {
  Net net{NetOptions{}};
  fill_all(*net);
  const auto sharded = shard_model(net, null_of(4), fully_sharded(4));
  const std::string text = error_of([&] { return net->blocks[1]->first.sum().item<double>(); });
  EXPECT_THAT(text, HasSubstr("block1"));
  EXPECT_THAT(text, HasSubstr("visit_parameters"));
}

TEST(Rules, ARootThatIsNoUnitIsRefused) {
  const auto linear = std::make_shared<torch::nn::LinearImpl>(3, 4);
  EXPECT_THAT(error_of([&] { shard_model(linear, alone()); }), HasSubstr("is not a Unit"));
}

TEST(Rules, AModelWithoutParametersIsRefused) {
  class EmptyImpl : public torch::nn::Module {
   public:
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  Unit<EmptyImpl> empty;
  EXPECT_THAT(error_of([&] { shard_model(empty, alone()); }), HasSubstr("has no parameters"));
}

TEST(Rules, AModelIsShardedOnce) {
  Net net{NetOptions{}};
  fill_all(*net);
  const auto sharded = shard_model(net, alone());
  EXPECT_THAT(error_of([&] { shard_model(net, alone()); }), HasSubstr("belongs to a sharded model already"));
}

TEST(Rules, NullArgumentsAndLimitsAreRefused) {
  Net net{NetOptions{}};
  fill_all(*net);
  EXPECT_THROW(shard_model(std::shared_ptr<torch::nn::Module>(), alone()), InvalidArgument);
  EXPECT_THROW(shard_model(net, nullptr), InvalidArgument);
  Options options;
  options.limit_all_gathers = 0;
  EXPECT_THROW(shard_model(net, alone(), options), InvalidArgument);
}

TEST(Rules, DegreesThatDoNotDivideNameTheNearest) {
  Net net{NetOptions{}};
  fill_all(*net);
  Options options;
  options.strategy.degrees = {3, 3, 3};
  EXPECT_THAT(error_of([&] { shard_model(net, null_of(4), options); }), HasSubstr("P=2 G=2 O=2"));
}

/// All that is made there outlives the mode.
TEST(Rules, InInferenceModeAModelIsShardedTurnedAndRead) {
  Net net{NetOptions{}};
  fill_all(*net);
  std::optional<Sharded> sharded;
  {
    const c10::InferenceMode mode;
    sharded.emplace(shard_model(net, alone()));
  }
  loss_of(net).backward();
  {
    const c10::InferenceMode mode;
    sharded->visit_parameters([](const std::string&, const at::Tensor& values) { values.mul_(2); }, /*writeback=*/true);
    sharded->reshard({1, 1, 1});
  }
  sharded->zero_grad();
  loss_of(net).backward();
}

TEST(Rules, RanksWithDifferentModelsNameTheParameter) {
  std::mutex mutex;
  std::vector<std::string> texts(3);
  comm::run_local(3, [&](comm::Fabric& fabric) {
    NetOptions options;
    if (fabric.rank() == 2) options.hidden = 30;
    Net net(options);
    fill_all(*net);
    try {
      shard_model(net, share(fabric), fully_sharded(3));
    } catch (const comm::Mismatch& error) {
      const std::scoped_lock lock(mutex);
      texts[static_cast<size_t>(fabric.rank())] = error.what();
    }
  });
  EXPECT_THAT(texts[0], HasSubstr("rank 2"));
  EXPECT_THAT(texts[1], HasSubstr("rank 2"));
  EXPECT_THAT(texts[2], HasSubstr("first [30, 13]"));
  EXPECT_THAT(texts[2], HasSubstr("first [29, 13]"));
}

TEST(Rules, RanksWithDifferentOptionsNameTheOption) {
  const std::pair<void (*)(Options&), const char*> cases[] = {
      {[](Options& options) { options.precision = Precision::bf16(); }, "computes in BFloat16, reduces in Float"},
      {[](Options& options) { options.accumulation = Accumulation::two_hop; }, "accumulation two_hop"},
      {[](Options& options) { options.cut_by = CutBy::rows; }, "cut by rows"},
      {[](Options& options) { options.sync_module_states = true; }, "sync_module_states on"}};
  for (const auto& [change, named] : cases) {
    std::mutex mutex;
    std::vector<std::string> texts(2);
    comm::run_local(2, [&](comm::Fabric& fabric) {
      Net net{NetOptions{}};
      fill_all(*net);
      Options options;  // NO_SHARD: nothing that is gathered would differ in size
      if (fabric.rank() == 1) change(options);
      try {
        shard_model(net, share(fabric), options);
      } catch (const comm::Mismatch& error) {
        const std::scoped_lock lock(mutex);
        texts[static_cast<size_t>(fabric.rank())] = error.what();
      }
    });
    EXPECT_THAT(texts[0], HasSubstr("rank 1 has another model or other options"));
    EXPECT_THAT(texts[1], HasSubstr(named));
  }
}

TEST(Rules, AFrozenParameterCanNotBeUnfrozenAfterwards) {
  NetOptions options;
  options.frozen_block = 1;
  Net net(options);
  fill_all(*net);
  const auto sharded = shard_model(net, alone());
  loss_of(net).backward();
  net->blocks[1]->bias.set_requires_grad(true);
  EXPECT_THAT(error_of([&] { loss_of(net); }), HasSubstr("block1.bias"));
}

TEST(Rules, ByRowsAFrozenParameterCanBeUnfrozenAfterwards) {
  NetOptions shape;
  shape.frozen_block = 1;
  Net net(shape), reference{NetOptions{}};
  fill_all(*net);
  fill_all(*reference);
  Options options;
  options.cut_by = CutBy::rows;
  auto sharded = shard_model(net, alone(), options);
  loss_of(net).backward();
  const size_t before = sharded.shards().size();
  sharded.zero_grad();
  for (at::Tensor& parameter : net->blocks[1]->parameters()) parameter.set_requires_grad(true);
  loss_of(net).backward();
  loss_of(reference).backward();
  ASSERT_EQ(sharded.shards().size(), before + net->blocks[1]->parameters().size());
  for (const auto& shard : sharded.shards()) {
    ASSERT_EQ(shard.slices.size(), 1U);
    const at::Tensor& expected = reference->named_parameters()[shard.slices[0].name].grad();
    EXPECT_TRUE(at::allclose(shard.grad.narrow(0, 0, expected.numel()), expected.flatten())) << shard.slices[0].name;
  }
}

TEST(Rules, ATrainableParameterThatIsFrozenAfterwardsHasAZeroGradient) {
  Net net{NetOptions{}};
  fill_all(*net);
  auto sharded = shard_model(net, alone());
  net->blocks[1]->bias.set_requires_grad(false);
  loss_of(net).backward();
  bool found = false;
  for (const auto& shard : sharded.shards()) {
    for (const auto& slice : shard.slices) {
      if (slice.name != "block1.bias") continue;
      found = true;
      EXPECT_EQ(shard.grad.narrow(0, slice.begin, slice.end - slice.begin).abs().max().item<double>(), 0);
    }
  }
  EXPECT_TRUE(found);
}

TEST(Rules, AUnitThatIsNotUsedHasNoGradient) {
  NetOptions options;
  options.skipped = 1;
  Net net(options);
  fill_all(*net);
  auto sharded = shard_model(net, alone());
  loss_of(net).backward();
  int undefined = 0;
  for (const auto& shard : sharded.shards()) undefined += !shard.grad.defined();
  EXPECT_EQ(undefined, 1);
}

TEST(Rules, NoSyncIsNotNested) {
  Net net{NetOptions{}};
  fill_all(*net);
  auto sharded = shard_model(net, alone());
  const auto outer = sharded.no_sync();
  EXPECT_THROW(sharded.no_sync(), InvalidArgument);
}

TEST(Rules, EvaluationLeavesNothingGatheredAndNoGradients) {
  comm::run_local(4, [&](comm::Fabric& fabric) {
    Net net{NetOptions{}};
    fill_all(*net);
    auto sharded = shard_model(net, share(fabric), fully_sharded(4));
    double first = 0;
    for (int step = 0; step < 4; ++step) {
      const at::NoGradGuard no_grad;
      const double loss = loss_of(net).item<double>();
      if (step == 0) first = loss;
      EXPECT_EQ(loss, first);
      EXPECT_THAT(error_of([&] { return net->scale.sum().item<double>(); }), HasSubstr("while it is sharded"));
    }
    EXPECT_EQ(sharded.statistics().pool_misses, 0);
    EXPECT_FALSE(sharded.shards()[0].grad.defined());
  });
}

TEST(Rules, TwoModelsInOneProcessTrainSideBySide) {
  const Reference expected = train_reference({}, 3, 0.5);
  comm::run_local(4, [&](comm::Fabric& fabric) {
    Net student{NetOptions{}}, teacher{NetOptions{}};
    fill_all(*student);
    fill_all(*teacher);
    auto sharded = shard_model(student, share(fabric), fully_sharded(4));
    Options replicated;
    replicated.strategy = mesh::preset("HYBRID_SHARD", 4, 2);
    auto other = shard_model(teacher, share(fabric), replicated);
    for (int step = 0; step < 3; ++step) {
      double teachers = 0;
      {
        const at::NoGradGuard no_grad;
        teachers = loss_of(teacher, step, fabric.rank(), 4).item<double>();
      }
      at::Tensor loss = loss_of(student, step, fabric.rank(), 4);
      if (step == 0) {
        EXPECT_NEAR(loss.item<double>(), teachers, 1e-6);
      }
      loss.backward();
      EXPECT_NEAR(sharded.sum_over_ranks(loss.item<double>()) / 4, expected.losses[step], 1e-5 * expected.losses[step]);
      sgd(sharded, 0.5);
    }
    EXPECT_FALSE(other.shards()[0].grad.defined());
  });
}

TEST(Rules, ABatchThatOnlySomeRanksHaveEndsInATimeoutThatNamesTheUnit) {
  std::string text;
  const auto body = [&](comm::Fabric& fabric) {
    Net net{NetOptions{}};
    fill_all(*net);
    auto sharded = shard_model(net, share(fabric), fully_sharded(2));
    if (fabric.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(4));  // alive, but it has no batch
      return;
    }
    try {
      loss_of(net);
    } catch (const comm::Timeout& error) {
      text = error.what();
      throw;
    }
  };
  EXPECT_THROW(comm::run_local(2, body, std::chrono::seconds(1)), comm::Timeout);
  EXPECT_THAT(text, HasSubstr("root"));
  EXPECT_THAT(text, HasSubstr("all_gather"));
}

TEST(Rules, AGraphThatOutlivesItsEngineIsHarmless) {
  at::Tensor loss;
  Net net{NetOptions{}};
  fill_all(*net);
  {
    const auto sharded = shard_model(net, alone());
    loss = loss_of(net);
  }
  EXPECT_THROW(loss.backward(), c10::Error);  // its parameters are gone; nothing of the engine is touched
}

TEST(Rules, DropoutUnderCheckpointingIsTheSameInBothForwards) {
  std::vector<double> sums;
  for (const bool checkpoint : {false, true}) {
    NetOptions options;
    options.dropout = 0.4;
    options.checkpoint = checkpoint;
    Net net(options);
    fill_all(*net);
    auto sharded = shard_model(net, alone());
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    generator.set_current_seed(7);
    loss_of(net).backward();
    double sum = 0;
    for (const auto& shard : sharded.shards()) sum += shard.grad.square().sum().item<double>();
    sums.push_back(sum);
    // The generator goes on where forward left it: recomputation leaves no trace.
    sums.push_back(at::rand({1}).item<double>());
  }
  EXPECT_NEAR(sums[0], sums[2], 1e-9 * sums[0]);
  EXPECT_EQ(sums[1], sums[3]);
}

TEST(Rules, HalfPrecisionComputesInItAndKeepsFullMasters) {
  const Reference expected = train_reference({}, 4, 0.5);
  for (const auto& precision : {Precision::bf16(), Precision::fp16()}) {
    for (const mesh::Degrees degrees : {mesh::Degrees{4, 4, 4}, {1, 1, 1}, {2, 2, 4}, {1, 4, 4}}) {
      comm::run_local(4, [&](comm::Fabric& fabric) {
        Training run;
        run.options.strategy = {degrees, true, true};
        run.options.precision = precision;
        const Reference actual = train_sharded(fabric, run);
        for (int i = 0; i < 4; ++i) EXPECT_NEAR(actual.losses[i], expected.losses[i], 2e-2 * expected.losses[i]);
        for (const auto& [name, value] : actual.parameters) EXPECT_EQ(value.scalar_type(), at::kFloat) << name;
        EXPECT_LE(worst_difference(actual.parameters, expected.parameters), 5e-2);
      });
    }
  }
}

TEST(Rules, WritingBackParametersChangesTheModelOnAllRanks) {
  comm::run_local(4, [&](comm::Fabric& fabric) {
    for (const mesh::Degrees degrees : {mesh::Degrees{4, 4, 4}, {1, 1, 4}, {2, 2, 2}}) {
      NetOptions options;
      options.frozen_block = 1;
      Net net(options);
      fill_all(*net);
      Options strategy;
      strategy.strategy = {degrees, true, true};
      auto sharded = shard_model(net, share(fabric), strategy);
      sharded.visit_parameters([](const std::string&, at::Tensor value) { value.zero_(); }, /*writeback=*/true);
      const Batch batch = batch_of(options, 0, 0, 1);
      const at::NoGradGuard no_grad;
      EXPECT_NEAR(net(batch.tokens, batch.targets).item<double>(), batch.targets.square().mean().item<double>(), 1e-6);
    }
  });
}

class NestedImpl : public torch::nn::Module {
 public:
  NestedImpl() { weight = register_parameter("weight", at::full({4, 4}, 0.5)); }
  at::Tensor forward(const at::Tensor& x) {
    if (inner && calls++ % 2 == 0) return inner(x).matmul(weight);  // this unit again, inside itself
    if (fails) throw std::runtime_error("no such batch");
    return x.matmul(weight);
  }
  at::Tensor weight;
  std::function<at::Tensor(const at::Tensor&)> inner;
  int calls = 0;
  bool fails = false;
};
using Nested = Unit<NestedImpl>;

class AroundImpl : public torch::nn::Module {
 public:
  AroundImpl() { nested = register_module("nested", Nested()); }
  at::Tensor forward(const at::Tensor& x) {
    try {
      return nested(x).sum();
    } catch (const std::runtime_error&) {
      return x.sum() * 0;
    }
  }
  Nested nested{nullptr};
};

TEST(Rules, AUnitMayCallItself) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Unit<AroundImpl> model;
    NestedImpl& nested = *model->nested;
    Options options;
    options.strategy = mesh::preset("FULL_SHARD", 2);
    Sharded sharded = shard_model(model, share(fabric), options);
    nested.inner = [&](const at::Tensor& x) { return model->nested(x); };
    for (int step = 0; step < 3; ++step) {
      const at::Tensor out = model(at::ones({2, 4}));
      EXPECT_NEAR(out.item<double>(), 2 * 4 * 4.0, 1e-5);  // 4 * 0.5, twice
      out.backward();
      sharded.zero_grad();
    }
  });
}

TEST(Rules, AForwardThatTheModelCatchesLeavesTheUnitUsable) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Unit<AroundImpl> model;
    Options options;
    options.strategy = mesh::preset("FULL_SHARD", 2);
    Sharded sharded = shard_model(model, share(fabric), options);
    const at::Tensor x = at::ones({2, 4});
    for (const bool fails : {true, false, true, false}) {
      model->nested->fails = fails;
      EXPECT_NEAR(model(x).item<double>(), fails ? 0 : 2 * 4 * 2.0, 1e-5);
      {
        const at::NoGradGuard evaluation;
        EXPECT_NEAR(model(x).item<double>(), fails ? 0 : 2 * 4 * 2.0, 1e-5);
      }
      EXPECT_EQ(sharded.engine().units()[1]->phase(), ShardedUnit::Phase::idle);
    }
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
