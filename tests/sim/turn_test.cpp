// What a turn of the dial takes of a device: room for what comes, and groups of what was left.

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "tesserae/optim/adamw.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/local_state.h"
#include "tests/shard/net.h"
#include "tests/sim/fabric.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

namespace net = shard::testing;

class SimTurn : public Sim {
 protected:
  static constexpr int ranks = 4;

  struct Outcome {
    std::vector<bool> refused = std::vector<bool>(ranks, false);
    std::vector<double> losses;
  };

  /// A step at 1 | 1 | 4, a turn to 4 | 4 | 4 for which the device of rank 1 has `room` more than is used, and a step.
  static Outcome turned(size_t room, bool elastic) {
    Outcome outcome;
    std::vector<char> refused(ranks, 0);
    run_on_devices(ranks, [&](comm::Fabric& fabric) {
      net::Uneven model;
      net::fill_all(*model);
      shard::Options options;
      options.strategy = {{1, 1, 4}, false, false};
      options.limit_all_gathers = 4;
      options.elastic = elastic;
      auto sharded = shard::shard_model(model, net::share(fabric), options);
      const auto step = [&] {
        const at::Tensor x = at::full({2, 64}, 0.1 * (fabric.rank() + 1)).to(fabric.device());
        const at::Tensor loss = model(x).pow(2).mean();
        loss.backward();
        const double mean = sharded.sum_over_ranks(loss.item<double>()) / ranks;
        net::sgd(sharded, 0.01);
        if (fabric.rank() == 0) outcome.losses.push_back(mean);
      };
      step();
      Memory& memory = Device::at(fabric.device().index()).memory();
      if (fabric.rank() == 1) memory.set_limit(memory.asked_bytes() + room);
      try {
        sharded.reshard({4, 4, 4});
      } catch (const OutOfMemory&) {
        refused[static_cast<size_t>(fabric.rank())] = 1;
        EXPECT_EQ(sharded.options().strategy.degrees, (mesh::Degrees{1, 1, 4}));
      }
      memory.set_limit(Memory::capacity);
      step();
    });
    outcome.refused.assign(refused.begin(), refused.end());
    return outcome;
  }
};

}  // namespace

// Four buffers of the size of the largest unit are gathered into, where its parameters lay once before.
TEST_F(SimTurn, WhatDoesNotFitIsRefusedByAllAndWhatIsBegunDoesNotFail) {
  constexpr size_t step = size_t{256} << 10;
  for (const bool elastic : {false, true}) {
    const Outcome with_room = turned(Memory::capacity / 2, elastic);
    ASSERT_EQ(with_room.losses.size(), 2u);
    int refused = 0, done = 0;
    for (size_t room = step; room <= 20 * step; room += step) {
      const Outcome outcome = turned(room, elastic);
      const auto count = std::ranges::count(outcome.refused, true);
      EXPECT_TRUE(count == 0 || count == ranks) << count << " ranks with room for " << room;
      ASSERT_EQ(outcome.losses.size(), 2u);
      EXPECT_NEAR(outcome.losses[1], with_room.losses[1], 1e-5 * with_room.losses[1]) << "room for " << room;
      count > 0 ? ++refused : ++done;
    }
    EXPECT_GE(refused, 4);
    EXPECT_GE(done, 4);
  }
}

// Two ranks on one device, which has room for what comes to one of them.
TEST_F(SimTurn, RanksThatShareADeviceAreAddedUp) {
  constexpr size_t step = size_t{128} << 10;
  int refused = 0, done = 0;
  for (size_t room = step; room <= 24 * step; room += step) {
    restart();
    std::vector<char> refusals(2, 0);
    Memory& memory = Device::at(0).memory();
    run_on_devices(
        2,
        [&](comm::Fabric& fabric) {
          net::Uneven model;
          net::fill_all(*model);
          shard::Options options;
          options.strategy = {{2, 2, 2}, false, false};
          auto sharded = shard::shard_model(model, net::share(fabric), options);
          at::Tensor before;
          const auto first = [&](const std::string& /*name*/, const at::Tensor& value) {
            if (!before.defined()) before = value.cpu();
          };
          sharded.visit_parameters(first);
          fabric.everyone().barrier();
          if (fabric.rank() == 0) memory.set_limit(memory.asked_bytes() + room);
          fabric.everyone().barrier();
          try {
            sharded.reshard({1, 1, 2});
          } catch (const OutOfMemory&) {
            refusals[static_cast<size_t>(fabric.rank())] = 1;
          }
          fabric.everyone().barrier();
          if (fabric.rank() == 0) memory.set_limit(Memory::capacity);
          fabric.everyone().barrier();
          EXPECT_TRUE(sharded.whole());
          at::Tensor after;
          sharded.visit_parameters([&](const std::string& /*name*/, const at::Tensor& value) {
            if (!after.defined()) after = value.cpu();
          });
          EXPECT_TRUE(at::equal(after, before));
        },
        std::chrono::seconds(20), /*devices=*/1);
    EXPECT_EQ(refusals[0], refusals[1]) << "room for " << room;
    refusals[0] != 0 ? ++refused : ++done;
    if (HasFailure()) return;
  }
  EXPECT_GE(refused, 4);
  EXPECT_GE(done, 4);
}

// On one rank nothing is exchanged, and nobody waits for a device on behalf of what moves.
TEST_F(SimTurn, WhatMovesToTheHostIsThereWhenItReturns) {
  EXPECT_EQ(right([&] {
              bool same = true;
              run_on_devices(1, [&](comm::Fabric& fabric) {
                net::NetOptions options;
                options.blocks = 1;
                net::Net model(options);
                net::fill_all(*model);
                shard::Options sharding;
                sharding.strategy = {{1, 1, 1}, true, true};
                auto sharded = shard::shard_model(model, net::share(fabric), sharding);
                optim::AdamW optimizer(sharded, optim::AdamWOptions{.lr = 1e-2});
                const auto batch = net::batch_of(options, 0, 0, 1);
                model(batch.tokens.to(fabric.device()), batch.targets.to(fabric.device())).backward();
                optimizer.step({.clip_norm = 0.5});
                optimizer.zero_grad();
                std::vector<at::Tensor> before, after;
                const auto read = [&](std::vector<at::Tensor>& values) {
                  optimizer.visit_state([&](const auto& /*shard*/, std::string_view /*name*/, const at::Tensor& value) {
                    values.insert(values.begin(), value.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
                  });
                  for (const auto& shard : sharded.shards()) {
                    values.push_back(shard.master.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
                  }
                };
                read(before);
                sharded.turn({{1, 1, 1}, {offload::Tier::host, offload::Tier::host, offload::Tier::host}});
                read(after);
                for (size_t i = 0; i < before.size(); ++i) same = same && at::equal(before[i], after[i]);
              });
              return same;
            }),
            seeds);
}

// Each tensor by itself: in a turn there is always something after it that waits.
TEST_F(SimTurn, OneTensorThatMovesToTheHostIsThereWhenItReturns) {
  EXPECT_EQ(right([] {
              bool same = false;
              run_on_devices(1, [&](comm::Fabric& fabric) {
                net::Net model(net::NetOptions{});
                net::fill_all(*model);
                shard::Options options;
                options.strategy = {{1, 1, 1}, true, true};
                auto sharded = shard::shard_model(model, net::share(fabric), options);
                const shard::Flat& flat = sharded.engine().buffers().front()->flat();
                const at::Tensor here = at::zeros({flat.chunk()}, on_device()), there = at::zeros({flat.chunk()});
                for (int i = 0; i < 4; ++i) here.add_(1);
                shard::move_local(fabric, flat, flat, {here}, {there});
                same = at::all(there.narrow(0, 0, flat.elements()) == 4).item<bool>();
              });
              return same;
            }),
            seeds);
}

// The host reads it as soon as it is there.
TEST_F(SimTurn, AnOptimizersCounterFollowsItsStateToTheHost) {
  EXPECT_EQ(right([&] {
              const auto shard_on = [](const at::TensorOptions& where) {
                return shard::Shard{.master = at::ones({64}, where), .grad = at::ones({64}, where), .slices = {}};
              };
              std::vector<shard::Shard> shards{shard_on(on_device())};
              optim::AdamW optimizer(optim::target_of(shards), optim::AdamWOptions{.lr = 1e-2});
              for (int i = 0; i < 3; ++i) optimizer.step({.measure_norm = false});
              std::vector<at::Tensor> state = optimizer.take(shards[0]);
              for (at::Tensor& tensor : state) tensor = tensor.cpu();
              shards[0].master = shards[0].master.cpu();
              // Beside the computation of the next step, which is queued already.
              at::Tensor other = at::zeros({3000}, on_device());
              for (int i = 0; i < 4; ++i) other.add_(1);
              optimizer.put(shards[0], state);
              double counted = 0;
              optimizer.visit_state([&](const auto& /*shard*/, std::string_view name, const at::Tensor& value) {
                if (name == "step") counted = value.item<double>();
              });
              return counted == 3;
            }),
            seeds);
}

TEST_F(SimTurn, GroupsThatNobodyNeedsEndAndAreMadeAnew) {
  run_on_devices(ranks, [](comm::Fabric& fabric) {
    net::NetOptions options;
    net::Net model(options);
    net::fill_all(*model);
    shard::Options sharding;
    sharding.strategy = {{4, 4, 4}, true, true};
    auto sharded = shard::shard_model(model, net::share(fabric), sharding);
    std::map<std::string, int> counts;
    uint64_t calls = 0;
    double last = 0;
    for (int round = 0; round < 3; ++round) {
      for (const mesh::Degrees& degrees : mesh::all_degrees(ranks)) {
        sharded.reshard(degrees);
        const auto batch = net::batch_of(options, 0, fabric.rank(), fabric.size());
        const at::Tensor loss = model(batch.tokens.to(fabric.device()), batch.targets.to(fabric.device()));
        loss.backward();
        const double mean = sharded.sum_over_ranks(loss.item<double>());
        if (last > 0) {
          EXPECT_LT(mean, last) << to_string(degrees) << " trains, round " << round;
        }
        last = mean;
        net::sgd(sharded, 0.05);
        EXPECT_GE(fabric.counters().calls(), calls) << "what ended is counted";
        calls = fabric.counters().calls();
        const int count = counts.try_emplace(to_string(degrees), fabric.group_count()).first->second;
        EXPECT_EQ(fabric.group_count(), count) << to_string(degrees) << ", round " << round;
        EXPECT_LE(count, 2 + 5) << "of this rank's host, of all, and what " << to_string(degrees) << " needs";
      }
    }
  });
}

// A rank that still holds a group keeps it on all of its members.
TEST_F(SimTurn, AGroupThatOneMemberHoldsStays) {
  run_on_devices(ranks, [](comm::Fabric& fabric) {
    auto group = fabric.borrow({0, 1, 2, 3}, comm::Traffic::gather);
    const std::string name = group->name();
    if (fabric.rank() != 2) group = nullptr;
    EXPECT_EQ(fabric.release_unused(), 0);
    group = fabric.borrow({0, 1, 2, 3}, comm::Traffic::gather);
    EXPECT_EQ(group->name(), name);
    group = nullptr;
    EXPECT_EQ(fabric.release_unused(), 1);
    group = fabric.borrow({0, 1, 2, 3}, comm::Traffic::gather);
    EXPECT_NE(group->name(), name) << "the store may remember the first";
    const at::Tensor sum = at::full({5}, 1.0f).to(fabric.device());
    group->all_reduce(sum);
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({5}, 4.0f)));
  });
}

}  // namespace tesserae::sim
