#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "tesserae/base/error.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

constexpr double tolerance = 1e-5;

void expect_same(const Reference& actual, const Reference& expected, const std::string& what) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size()) << what;
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], tolerance * std::abs(expected.losses[i]))
        << what << " step " << i;
  }
  EXPECT_LE(worst_difference(actual.parameters, expected.parameters), tolerance) << what;
}

/// Trains on `ranks` threads and compares every rank's result with one process.
void expect_parity(int ranks, const Training& run, const std::string& what) {
  const Reference expected = train_reference(run.net, run.steps, run.lr, run.micro);
  std::mutex mutex;
  comm::run_local(ranks, [&](comm::Fabric& fabric) {
    const Reference actual = train_sharded(fabric, run);
    const std::scoped_lock lock(mutex);
    expect_same(actual, expected, cat(what, " rank ", fabric.rank()));
  });
}

/// Of rank 0, after the run on four threads.
Statistics statistics_of(const Training& run) {
  Statistics statistics;
  comm::run_local(
      4, [&](comm::Fabric& fabric) { train_sharded(fabric, run, fabric.rank() == 0 ? &statistics : nullptr); });
  return statistics;
}

std::string text(const mesh::Strategy& strategy) {
  return cat(to_string(strategy.degrees), strategy.free_after_forward ? " free after forward" : " keep after forward",
             strategy.free_after_backward ? ", free after backward" : ", keep after backward");
}

std::vector<mesh::Strategy> all_strategies(int ranks) {
  std::vector<mesh::Strategy> strategies;
  for (const auto& degrees : mesh::all_degrees(ranks)) {
    strategies.push_back({degrees, true, true});
    strategies.push_back({degrees, false, true});
    strategies.push_back({degrees, false, false});
  }
  return strategies;
}

TEST(Engine, EveryStrategyOfFourRanksTrainsLikeOneProcess) {
  for (const auto cut_by : {CutBy::elements, CutBy::rows}) {
    for (const auto& strategy : all_strategies(4)) {
      Training run;
      run.options.strategy = strategy;
      run.options.cut_by = cut_by;
      expect_parity(4, run, text(strategy) + (cut_by == CutBy::rows ? ", by rows" : ""));
    }
  }
}

TEST(Engine, OneTwoAndEightRanks) {
  for (const int ranks : {1, 2, 8}) {
    for (const auto& degrees : mesh::all_degrees(ranks)) {
      Training run;
      run.steps = 2;
      run.options.strategy = {degrees, true, true};
      expect_parity(ranks, run, cat(ranks, " ranks, ", to_string(degrees)));
    }
  }
}

struct Feature {
  std::string name;
  NetOptions net;
};

std::vector<Feature> features() {
  std::vector<Feature> list;
  const auto add = [&](std::string name, auto change) {
    Feature feature{std::move(name), {}};
    change(feature.net);
    list.push_back(feature);
  };
  add("tied", [](NetOptions& net) { net.tied = true; });
  add("nested", [](NetOptions& net) { net.nested = true; });
  add("frozen first block", [](NetOptions& net) { net.frozen_block = 0; });
  add("frozen middle block", [](NetOptions& net) { net.frozen_block = 1; });
  add("frozen matrices", [](NetOptions& net) { net.frozen_matrix = true; });
  add("unused parameters", [](NetOptions& net) { net.unused = true; });
  add("block called twice", [](NetOptions& net) { net.twice = 1; });
  add("block never called", [](NetOptions& net) { net.skipped = 1; });
  add("checkpointed", [](NetOptions& net) { net.checkpoint = true; });
  add("checkpointed, called twice", [](NetOptions& net) { net.checkpoint = true, net.twice = 1; });
  add("checkpointed, nested, tied", [](NetOptions& net) { net.checkpoint = net.nested = net.tied = true; });
  add("meta device", [](NetOptions& net) { net.meta = true; });
  return list;
}

TEST(Engine, FeaturesTrainLikeOneProcess) {
  for (const auto& feature : features()) {
    for (const mesh::Degrees degrees : {mesh::Degrees{4, 4, 4}, {2, 4, 4}, {1, 1, 4}, {1, 1, 1}, {1, 2, 4}}) {
      for (const bool free_after_forward : {true, false}) {
        for (const auto cut_by : {CutBy::elements, CutBy::rows}) {
          Training run;
          run.net = feature.net;
          run.options.strategy = {degrees, free_after_forward, true};
          run.options.cut_by = cut_by;
          expect_parity(4, run,
                        cat(feature.name, ", ", text(run.options.strategy), cut_by == CutBy::rows ? ", by rows" : ""));
        }
      }
    }
  }
}

// A rank draws what it has a part of, in each layout; all of them together draw everything.
TEST(Engine, InitialValuesThatARankHoldsNothingOfAreNotMade) {
  for (const mesh::Degrees degrees : {mesh::Degrees{4, 4, 4}, {2, 4, 4}, {1, 1, 4}}) {
    std::mutex mutex;
    std::map<std::string, int> all;
    comm::run_local(4, [&](comm::Fabric& fabric) {
      NetOptions net;
      net.meta = true;
      Net model(net);
      int own = 0;
      Options options;
      options.strategy = {degrees, true, true};
      options.initialize = [&](const std::string& name, at::Tensor& parameter) {
        fill(name, parameter);
        ++own;
        const std::lock_guard lock(mutex);
        ++all[name];
      };
      const int parameters = static_cast<int>(model->parameters().size());
      auto sharded = shard_model(model, share(fabric), options);
      if (degrees.parameters == 1) {
        EXPECT_EQ(own, parameters) << "it holds all of them";
      } else {
        EXPECT_LT(own, parameters) << to_string(degrees);
      }
      sharded.visit_parameters([&](const std::string& name, const at::Tensor& value) {
        at::Tensor expected = at::empty_like(value);
        fill(name, expected);
        EXPECT_TRUE(at::equal(value, expected)) << name << " at " << to_string(degrees);
      });
    });
    EXPECT_EQ(all.size(), Net(NetOptions{})->parameters().size()) << to_string(degrees);
  }
}

TEST(Engine, AccumulationTrainsLikeOneProcess) {
  for (const auto& strategy : all_strategies(4)) {
    for (const auto accumulation : {Accumulation::local, Accumulation::two_hop}) {
      for (const auto cut_by : {CutBy::elements, CutBy::rows}) {
        Training run;
        run.micro = 2;
        run.net.tied = true;
        run.options.strategy = strategy;
        run.options.accumulation = accumulation;
        run.options.cut_by = cut_by;
        expect_parity(4, run,
                      cat(text(strategy), accumulation == Accumulation::local ? ", local" : ", two hop",
                          cut_by == CutBy::rows ? ", by rows" : ""));
      }
    }
  }
}

TEST(Engine, LimitsOfOneStillTrain) {
  Training run;
  run.options.strategy = {{4, 4, 4}, true, true};
  run.options.limit_all_gathers = 1;
  run.options.limit_reductions = 1;
  expect_parity(4, run, "limits of one");
}

TEST(Engine, ElasticMemoryTrainsLikeOneProcess) {
  for (const auto& strategy : all_strategies(4)) {
    for (const int micro : {1, 2}) {
      Training run;
      run.options.strategy = strategy;
      run.options.elastic = true;
      run.options.accumulation = Accumulation::two_hop;
      run.micro = micro;
      expect_parity(4, run, cat("elastic, ", text(strategy)));
    }
  }
}

TEST(Engine, AllocatesNothingAfterTheThirdStep) {
  for (const auto& strategy : all_strategies(4)) {
    for (const int micro : {1, 2}) {
      Training run;
      run.options.strategy = strategy;
      run.options.accumulation = Accumulation::two_hop;
      run.options.cut_by = micro == 1 ? CutBy::rows : CutBy::elements;
      run.micro = micro;
      run.steps = 3;
      const Statistics three = statistics_of(run);
      run.steps = 9;
      const Statistics nine = statistics_of(run);
      EXPECT_EQ(three.allocations, nine.allocations) << text(strategy);
      EXPECT_EQ(nine.pool_misses, 0) << text(strategy) << " micro " << micro;
    }
  }
}

TEST(Engine, PrefetchesInBothDirectionsFromTheSecondStepOn) {
  Training run;
  run.options.strategy = {{4, 4, 4}, true, true};
  run.net.blocks = 6;
  run.steps = 5;
  const Statistics statistics = statistics_of(run);
  EXPECT_EQ(statistics.departures, 0);
  // A step gathers root once and six blocks in forward, five of them again in backward (the last is kept): 12. The
  // first step has no record: it prefetches nothing, and gathers root and the last block once more.
  EXPECT_EQ(statistics.gathers, 14 + 4 * 12);
  EXPECT_EQ(statistics.prefetch_hits, 4 * 11);
}

// What stays gathered after forward is no stock of what was gathered ahead: it must not use up the limit.
TEST(Engine, PrefetchesInForwardAlsoWhereNothingIsFreedAfterIt) {
  for (const bool free_after_backward : {true, false}) {
    Training run;
    run.options.strategy = {{4, 4, 4}, false, free_after_backward};
    run.net.blocks = 6;
    run.steps = 5;
    const Statistics statistics = statistics_of(run);
    EXPECT_EQ(statistics.gathers, 5 * 7);
    EXPECT_EQ(statistics.prefetch_hits, 4 * 6) << "all blocks, from the second step on";
    EXPECT_EQ(statistics.pool_misses, 0);
  }
}

/// Keeps a lane busy until open(). Whoever waits for the lane instead of opening finds an error there, late.
class Gate {
 public:
  explicit Gate(comm::Lane& lane) {
    lane.submit([opened = opened_.get_future().share()] {
      if (opened.wait_for(std::chrono::minutes(1)) == std::future_status::ready) return;
      throw std::runtime_error("somebody waits for a lane that should be busy beside it");
    });
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

/// A small network on an engine, and the first batch of this rank.
struct SmallJob {
  Net net;
  Sharded sharded;
  Batch batch;
};

SmallJob small_job(comm::Fabric& fabric, const NetOptions& shape, const mesh::Strategy& strategy) {
  Net net(shape);
  fill_all(*net);
  Options options;
  options.strategy = strategy;
  return {net, shard_model(net, share(fabric), options), batch_of(shape, 0, fabric.rank(), fabric.size())};
}

void expect_reduction_before_the_next(bool unused) {
  for (const mesh::Degrees degrees : {mesh::Degrees{4, 4, 4}, {1, 1, 1}}) {
    comm::run_local(4, [&](comm::Fabric& fabric) {
      NetOptions shape;
      shape.blocks = 2;
      shape.unused = unused;
      auto [net, sharded, batch] = small_job(fabric, shape, {degrees, true, true});
      comm::Lane& lane = fabric.lane(comm::Traffic::reduce);
      const comm::Group& group = fabric.group({0, 1, 2, 3}, comm::Traffic::reduce);
      at::Tensor loss = net(batch.tokens, batch.targets);

      Gate gate(lane);
      uint64_t sent = 0;
      net->blocks[0]->scale.register_hook([&](const at::Tensor&) {
        gate.open();
        // Runs after what the lane was given before.
        lane.submit([&] { sent = group.counters().reduce_scatter.calls + group.counters().all_reduce.calls; }).wait();
      });
      loss.backward();
      EXPECT_EQ(sent, 1) << to_string(degrees) << ": the reduction of the second block";
    });
  }
}

TEST(Engine, AReductionIsSentBeforeTheBackwardOfTheUnitBeforeAndNotWaitedForInIt) {
  expect_reduction_before_the_next(/*unused=*/false);
}

// Other ranks may have all of the unit's gradients: the order must be the same on all.
TEST(Engine, WithAParameterThatHasNoGradientTheReductionIsSentAtTheSamePlace) {
  expect_reduction_before_the_next(/*unused=*/true);
}

// Nothing is gathered, and without a boundary nothing reduced.
TEST(Engine, ARankThatWaitsForNobodyHearsOfALossInItsForwardOrBackward) {
  const auto body = [](comm::Fabric& fabric) {
    auto [net, sharded, batch] = small_job(fabric, NetOptions{}, {{1, 1, 1}, false, false});
    const NoSync no_sync(sharded.engine());
    for (int i = 0; i < 100000; ++i) {
      if (fabric.rank() == 1 && i == 2) throw std::runtime_error("lost");
      net(batch.tokens, batch.targets).backward();
    }
  };
  EXPECT_THROW(comm::run_local(2,
                               [&](comm::Fabric& fabric) {
                                 if (fabric.rank() == 1) return body(fabric);
                                 try {
                                   body(fabric);
                                   ADD_FAILURE() << "it went on without its peer";
                                 } catch (const comm::PeerLost& lost) {
                                   EXPECT_EQ(lost.ranks, std::vector<int>{1}) << lost.what();
                                 }
                               }),
               std::runtime_error);
}

// All parameters of a block are frozen after it was wrapped, or one has no gradient.
TEST(Engine, AUnitIsFreedWhenItsBackwardIsOverWhicheverGradientsItHasHad) {
  for (const bool frozen : {false, true}) {
    comm::run_local(2, [&](comm::Fabric& fabric) {
      NetOptions shape;
      shape.blocks = 5;
      shape.unused = true;
      auto [net, sharded, batch] = small_job(fabric, shape, {{2, 2, 2}, true, true});
      if (frozen) {
        for (int block = 1; block < 5; ++block) {
          for (at::Tensor& parameter : net->blocks[block]->parameters()) parameter.set_requires_grad(false);
        }
      }
      at::Tensor loss = net(batch.tokens, batch.targets);
      const auto& units = sharded.engine().units();
      int holding = 0;
      net->blocks[0]->scale.register_hook([&](const at::Tensor&) {
        for (size_t unit = 2; unit < units.size(); ++unit) holding += units[unit]->holds_buffers();
      });
      loss.backward();
      EXPECT_EQ(holding, 0) << (frozen ? "frozen" : "one unused");
    });
  }
}

/// Two blocks, and something between their forwards.
class RelayImpl : public torch::nn::Module {
 public:
  RelayImpl() : first(NetOptions{}), second(NetOptions{}) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor half = first(x);
    if (between) between();
    return second(half);
  }
  Unit<BlockImpl> first, second;
  std::function<void()> between;
};
using Relay = Unit<RelayImpl>;

TEST(Engine, ARefreshIsNotWaitedForBeforeItsUnitsForward) {
  constexpr double lr = 0.5;
  const at::Tensor x = at::linspace(-1, 1, 2 * NetOptions{}.dimension).view({2, -1});
  Relay alone;
  fill_all(*alone);
  alone(x).square().mean().backward();
  {
    const at::NoGradGuard no_grad;
    for (auto& parameter : alone->parameters()) parameter.sub_(parameter.grad(), lr);
  }
  const at::Tensor expected = alone(x).detach();

  comm::run_local(4, [&](comm::Fabric& fabric) {
    Relay relay;
    fill_all(*relay);
    Options options;
    options.strategy = {{1, 1, 4}, true, true};
    Sharded sharded = shard_model(relay, std::shared_ptr<comm::Fabric>(&fabric, [](comm::Fabric*) {}), options);
    relay(x).square().mean().backward();
    const at::Tensor before = relay->second->scale.detach().clone();

    // The lane is busy when the last shard, of the second block, is published.
    std::optional<Gate> gate;
    for (const Shard& shard : sharded.shards()) {
      const at::NoGradGuard no_grad;
      shard.master.sub_(shard.grad, lr);
      if (shard.index == sharded.shards().back().index) gate.emplace(fabric.lane(comm::Traffic::gather));
      sharded.publish(shard.index);
    }
    sharded.zero_grad();
    relay->between = [&] {
      EXPECT_ANY_THROW(relay->second->scale.sum()) << "the refresh is under way";
      gate->open();
    };
    EXPECT_TRUE(at::allclose(relay(x), expected, tolerance, tolerance));
    EXPECT_FALSE(at::equal(relay->second->scale, before));
  });
}

TEST(Engine, AnExceptionInBackwardLeavesTheNextStepClean) {
  const Reference expected = train_reference({}, 3, 0.5);
  comm::run_local(4, [&](comm::Fabric& fabric) {
    Net net{NetOptions{}};
    fill_all(*net);
    Options options;
    options.strategy = {{4, 4, 4}, true, true};
    Sharded sharded = shard_model(net, std::shared_ptr<comm::Fabric>(&fabric, [](comm::Fabric*) {}), options);
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      const Batch batch = batch_of({}, step, fabric.rank(), 4);
      // Every rank throws at the same place, as an error in user code on all ranks would.
      at::Tensor bad = net(batch.tokens, batch.targets);
      const auto hook = net->blocks[0]->scale.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("user code"); });
      EXPECT_THROW(bad.backward(), std::runtime_error);
      net->blocks[0]->scale.remove_hook(hook);

      at::Tensor loss = net(batch.tokens, batch.targets);
      loss.backward();
      losses.push_back(sharded.sum_over_ranks(loss.item<double>()) / 4);
      sgd(sharded, 0.5);
    }
    for (int step = 0; step < 3; ++step) EXPECT_NEAR(losses[step], expected.losses[step], 1e-5 * expected.losses[step]);
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
