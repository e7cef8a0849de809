// The engine on simulated accelerators: what it computes is what one process on the CPU does, and is the same to the
// bit whatever the timing. A missing wait, a buffer given back too early or a use of the wrong device makes a
// difference, or NaN, for some seed.

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>

#include "tesserae/offload/disk.h"
#include "tesserae/optim/adamw.h"
#include "tests/shard/net.h"
#include "tests/sim/fabric.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

namespace net = shard::testing;

class SimEngine : public Sim {
 protected:
  static constexpr int ranks = 4;

  static std::vector<net::Reference> train(const net::Training& run) {
    std::vector<net::Reference> results(ranks);
    run_on_devices(ranks, [&](comm::Fabric& fabric) {
      net::Training own = run;
      if (own.options.tiers.uses(offload::Tier::disk)) own.options.disk = scratch();
      results[static_cast<size_t>(fabric.rank())] = net::train_sharded(fabric, own);
    });
    return results;
  }

  /// Of one rank, that keeps nothing in memory.
  static std::shared_ptr<offload::Disk> scratch() {
    return std::make_shared<offload::Disk>(offload::DiskOptions{.folder = ::testing::TempDir(), .memory = 0});
  }

  /// Of a step with each setting, which begins with the first one; `at_end`: with every rank's model.
  static std::vector<double> losses_of(const std::vector<shard::Setting>& settings, uint64_t seed,
                                       const std::function<void(shard::Sharded&)>& at_end = {}) {
    restart({.seed = seed});
    std::vector<double> losses;
    run_on_devices(ranks, [&](comm::Fabric& fabric) {
      net::NetOptions options;
      net::Net model(options);
      net::fill_all(*model);
      shard::Options sharding;
      sharding.strategy = {settings.front().degrees, true, true};
      auto sharded = shard::shard_model(model, net::share(fabric), sharding);
      optim::AdamW optimizer(sharded, optim::AdamWOptions{.lr = 1e-2});
      const auto disk = scratch();
      for (size_t step = 0; step < settings.size(); ++step) {
        sharded.turn(settings[step], disk);
        const auto batch = net::batch_of(options, static_cast<int64_t>(step), fabric.rank(), fabric.size());
        const at::Tensor loss = model(batch.tokens.to(fabric.device()), batch.targets.to(fabric.device()));
        loss.backward();
        const double mean = sharded.sum_over_ranks(loss.item<double>()) / fabric.size();
        optimizer.step({.clip_norm = 0.5});
        optimizer.zero_grad();
        if (fabric.rank() == 0) losses.push_back(mean);
      }
      if (at_end) at_end(sharded);
    });
    return losses;
  }

  static bool same(const net::Reference& a, const net::Reference& b) {
    if (a.losses != b.losses || a.parameters.size() != b.parameters.size()) return false;
    for (const auto& [name, value] : a.parameters) {
      if (!at::equal(value, b.parameters.at(name))) return false;
    }
    return true;
  }

  static void expect_parity(const net::Training& run, const std::string& what, int seeds) {
    constexpr double tolerance = 1e-5;
    const net::Reference expected = net::train_reference(run.net, run.steps, run.lr, run.micro);
    std::vector<net::Reference> first;
    for (uint64_t seed = 0; seed < seeds_of(seeds); ++seed) {
      restart({.seed = seed});
      auto results = train(run);
      if (first.empty()) first = results;
      for (size_t rank = 0; rank < ranks; ++rank) {
        EXPECT_TRUE(same(results[rank], first[rank]))
            << what << ", rank " << rank << ": other numbers with seed " << seed;
        EXPECT_LE(net::worst_difference(results[rank].parameters, expected.parameters), tolerance)
            << what << ", rank " << rank << ", seed " << seed;
      }
      if (HasFailure()) return;
    }
  }
};

mesh::Strategy strategy(int parameters, int gradients, int optimizer, bool after_forward, bool after_backward) {
  return {{parameters, gradients, optimizer}, after_forward, after_backward};
}

}  // namespace

TEST_F(SimEngine, EveryStrategyTrainsLikeOneProcess) {
  for (const auto& degrees : mesh::all_degrees(ranks)) {
    net::Training run;
    run.options.strategy = {degrees, true, true};
    expect_parity(run, to_string(degrees), 4);
  }
}

TEST_F(SimEngine, FullShardingWithManySeeds) {
  net::Training run;
  run.options.strategy = strategy(4, 4, 4, true, true);
  expect_parity(run, "FULL_SHARD", seeds);
}

TEST_F(SimEngine, HybridWithManySeeds) {
  net::Training run;
  run.options.strategy = strategy(2, 2, 4, true, true);
  expect_parity(run, "2 | 2 | 4", seeds);
}

TEST_F(SimEngine, BuffersThatComeAndGo) {
  net::Training run;
  run.options.strategy = strategy(4, 4, 4, true, true);
  run.options.elastic = true;
  expect_parity(run, "elastic", seeds);
}

TEST_F(SimEngine, AccumulationInTwoHops) {
  net::Training run;
  run.options.strategy = strategy(2, 2, 4, false, true);
  run.options.accumulation = shard::Accumulation::two_hop;
  run.micro = 2;
  expect_parity(run, "two hops", 8);
}

TEST_F(SimEngine, RowsTiedAndRecomputed) {
  net::Training run;
  run.net.tied = true;
  run.net.checkpoint = true;
  run.options.cut_by = shard::CutBy::rows;
  run.options.strategy = strategy(4, 4, 4, true, true);
  expect_parity(run, "by rows", 8);
}

TEST_F(SimEngine, StateOnTheHost) {
  net::Training run;
  run.options.tiers = {offload::Tier::host, offload::Tier::host, offload::Tier::host};
  run.options.strategy = strategy(4, 4, 4, true, true);
  expect_parity(run, "offload", seeds);
  run.options.strategy = strategy(2, 2, 4, true, true);
  run.options.precision.reduce = at::kDouble;  // what leaves the device is cast on the way
  expect_parity(run, "offload, 2 | 2 | 4", 4);
  run.micro = 2;
  run.options.accumulation = shard::Accumulation::two_hop;
  expect_parity(run, "offload, accumulated", 4);
}

// Where one rank trains alone its lanes are the stream that computes.
TEST_F(SimEngine, StateOnTheHostOfOneRank) {
  net::Training run;
  run.options.tiers = {offload::Tier::host, offload::Tier::host, offload::Tier::host};
  run.options.strategy = strategy(1, 1, 1, true, true);
  const net::Reference expected = net::train_reference(run.net, run.steps, run.lr, run.micro);
  for (uint64_t seed = 0; seed < seeds_of(4); ++seed) {
    restart({.seed = seed});
    const auto fabric = comm::Fabric::null(mesh::World::single_host(0, 1), device(0));
    const net::Reference result = net::train_sharded(*fabric, run);
    EXPECT_LE(net::worst_difference(result.parameters, expected.parameters), 1e-5) << "seed " << seed;
  }
}

TEST_F(SimEngine, GradientsOnTheHostOfOneRankAreThereAfterTheBackward) {
  constexpr auto host = offload::Tier::host, disk = offload::Tier::disk;
  for (const offload::Tiers& tiers : {offload::Tiers{host, host, host}, offload::Tiers{host, host, disk}}) {
    EXPECT_EQ(right([&] {
                const auto fabric = comm::Fabric::null(mesh::World::single_host(0, 1), device(0));
                net::NetOptions options;
                net::Net model(options);
                net::fill_all(*model);
                shard::Options sharding;
                sharding.tiers = tiers;
                if (tiers.uses(disk)) sharding.disk = scratch();
                sharding.strategy = strategy(1, 1, 1, true, true);
                auto sharded = shard::shard_model(model, fabric, sharding);
                const auto batch = net::batch_of(options, 0, 0, 1);
                model(batch.tokens.to(device(0)), batch.targets.to(device(0))).backward();
                std::vector<at::Tensor> read;
                for (const auto& shard : sharded.shards()) read.push_back(shard.grad.clone());
                Device::at(0).synchronize();
                bool same = true;
                for (const auto& shard : sharded.shards()) {
                  same = same && at::equal(read[static_cast<size_t>(shard.index)], shard.grad);
                }
                return same;
              }),
              seeds)
        << to_string(tiers);
  }
}

// Masters and gradients are copied on the lanes' streams beside the computation. The host waits once for what comes
// from each lane, when a backward is over; how many units there are, and what a refresh copies, makes no difference.
TEST_F(SimEngine, StateOnTheHostIsCopiedBesideTheComputation) {
  const auto waits_of = [](int blocks, int parameters) {
    std::vector<int64_t> waits(ranks);
    run_on_devices(ranks, [&](comm::Fabric& fabric) {
      net::NetOptions options;
      options.blocks = blocks;
      net::Net model(options);
      net::fill_all(*model);
      shard::Options sharding;
      sharding.strategy = strategy(parameters, 4, 4, true, true);
      sharding.tiers = {offload::Tier::host, offload::Tier::host, offload::Tier::host};
      auto sharded = shard::shard_model(model, net::share(fabric), sharding);
      const auto batch = net::batch_of(options, 0, fabric.rank(), fabric.size());
      const at::Tensor tokens = batch.tokens.to(fabric.device()), targets = batch.targets.to(fabric.device());
      const auto step = [&] {
        model(tokens, targets).backward();
        for (const auto& shard : sharded.shards()) {
          EXPECT_TRUE(is_pinned(shard.master.const_data_ptr()));
          EXPECT_TRUE(is_pinned(shard.grad.const_data_ptr()));
        }
        net::sgd(sharded, 0.1);
      };
      const Counters spent = spent_by_third(fabric.device().index(), step);
      waits[static_cast<size_t>(fabric.rank())] = spent.synchronizations;
      EXPECT_GT(spent.copied_bytes, 0);
    });
    return waits;
  };
  for (const int parameters : {4, 2, 1}) {
    const std::vector<int64_t> few = waits_of(2, parameters);
    EXPECT_EQ(few, waits_of(6, parameters)) << "P = " << parameters;
    EXPECT_EQ(few, std::vector<int64_t>(ranks, 2)) << "P = " << parameters;
  }
}

TEST_F(SimEngine, StateOnADisk) {
  for (const bool elastic : {false, true}) {
    net::Training run;
    run.options.tiers = {offload::Tier::disk, offload::Tier::disk, offload::Tier::disk};
    run.options.strategy = strategy(2, 2, 4, true, true);
    run.options.elastic = elastic;
    expect_parity(run, "disk", 4);
  }
}

// From the device to memory of the host, to a disk, and back.
TEST_F(SimEngine, TiersAreTurned) {
  using offload::Tier;
  const auto all = [](Tier tier) { return offload::Tiers{tier, tier, tier}; };
  const std::vector<shard::Setting> stays(5, {{2, 2, 4}, {}});
  const std::vector<shard::Setting> turns{{{2, 2, 4}, {}},
                                          {{2, 2, 4}, all(Tier::host)},
                                          {{4, 4, 4}, all(Tier::disk)},
                                          {{1, 1, 4}, all(Tier::disk)},
                                          {{2, 2, 4}, {}}};
  const auto refuses = [](shard::Sharded& sharded) {
    EXPECT_THROW(sharded.turn({{2, 2, 4}, {.optimizer = Tier::host}}), InvalidArgument)
        << "an optimizer step has all it works on in one place";
  };
  const std::vector<double> expected = losses_of(stays, 0, refuses);
  ASSERT_EQ(expected.size(), 5u);
  for (uint64_t seed = 0; seed < seeds_of(6); ++seed) {
    const std::vector<double> losses = losses_of(turns, seed, refuses);
    ASSERT_EQ(losses.size(), 5u);
    for (size_t step = 0; step < 5; ++step) EXPECT_NEAR(losses[step], expected[step], 1e-6) << "seed " << seed;
  }
}

TEST_F(SimEngine, TheDialIsTurned) {
  const std::vector<shard::Setting> turns{{{4, 4, 4}, {}}, {{1, 1, 4}, {}}, {{2, 2, 2}, {}}, {{2, 4, 4}, {}}};
  std::vector<std::vector<double>> all;
  for (uint64_t seed = 0; seed < seeds_of(8); ++seed) {
    const std::vector<double> losses = losses_of(turns, seed);
    ASSERT_EQ(losses.size(), 4u);
    EXPECT_LT(losses.back(), losses.front());
    all.push_back(losses);
    EXPECT_EQ(all.back(), all.front()) << "seed " << seed;
  }
}

// The host queues a whole step and waits for nothing in it.
TEST_F(SimEngine, AStepWaitsForNothing) {
  for (const bool elastic : {false, true}) {
    run_on_devices(ranks, [&](comm::Fabric& fabric) {
      net::NetOptions options;
      net::Net model(options);
      net::fill_all(*model);
      shard::Options sharding;
      sharding.strategy = strategy(2, 2, 4, true, true);
      sharding.elastic = elastic;
      auto sharded = shard::shard_model(model, net::share(fabric), sharding);
      optim::AdamW optimizer(sharded, optim::AdamWOptions{.lr = 1e-2});
      const auto batch = net::batch_of(options, 0, fabric.rank(), fabric.size());
      const at::Tensor tokens = batch.tokens.to(fabric.device()), targets = batch.targets.to(fabric.device());
      const Counters spent = spent_by_third(fabric.device().index(), [&] {
        model(tokens, targets).backward();
        optimizer.step({.measure_norm = false});  // which is a number of the host
        optimizer.zero_grad();
      });
      EXPECT_EQ(spent.synchronizations, 0) << "rank " << fabric.rank();
      EXPECT_EQ(spent.unknown_shapes, 0);
      EXPECT_EQ(spent.copied_bytes, 0);
      EXPECT_GT(spent.collectives, 0);
      Device::at(fabric.device().index()).synchronize();
      const shard::Statistics statistics = sharded.statistics();
      EXPECT_GT(statistics.exposed_gather, 0) << "the first gather has nothing to hide behind";
      EXPECT_GT(statistics.exposed_reduce, 0) << "nor has the last reduction";
    });
  }
}

// What was gathered ahead and is not used is given back while it may still be on its way.
TEST_F(SimEngine, StepsThatDepartFromTheRecord) {
  std::vector<std::vector<double>> all;
  for (uint64_t seed = 0; seed < seeds_of(seeds); ++seed) {
    restart({.seed = seed});
    std::vector<double> losses;
    run_on_devices(ranks, [&](comm::Fabric& fabric) {
      net::NetOptions options;
      options.blocks = 4;
      net::Net model(options);
      net::fill_all(*model);
      shard::Options sharding;
      sharding.strategy = strategy(4, 4, 4, true, true);
      sharding.limit_all_gathers = 3;
      sharding.elastic = seed % 2 != 0;
      auto sharded = shard::shard_model(model, net::share(fabric), sharding);
      for (int64_t step = 0; step < 6; ++step) {
        model->options.skipped = step % 2 != 0 ? static_cast<int>(step / 2) : -1;
        const auto batch = net::batch_of(options, step, fabric.rank(), fabric.size());
        const at::Tensor loss = model(batch.tokens.to(fabric.device()), batch.targets.to(fabric.device()));
        loss.backward();
        const double mean = sharded.sum_over_ranks(loss.item<double>()) / fabric.size();
        net::sgd(sharded, 0.5);
        if (fabric.rank() == 0) losses.push_back(mean);
      }
    });
    all.push_back(losses);
    ASSERT_EQ(all.back(), all.front()) << "seed " << seed;
  }
}

// The same, in an evaluation: its memory is somebody else's at once.
TEST_F(SimEngine, WhatIsGivenBackOnItsWayIsNotWrittenLater) {
  for (uint64_t seed = 0; seed < seeds_of(seeds); ++seed) {
    restart({.seed = seed});
    run_on_devices(ranks, [&](comm::Fabric& fabric) {
      net::NetOptions options;
      options.blocks = 4;
      net::Net model(options);
      net::fill_all(*model);
      shard::Options sharding;
      sharding.strategy = strategy(4, 4, 4, true, true);
      sharding.limit_all_gathers = 3;
      sharding.elastic = true;
      auto sharded = shard::shard_model(model, net::share(fabric), sharding);
      const auto batch = net::batch_of(options, 0, fabric.rank(), fabric.size());
      const at::Tensor tokens = batch.tokens.to(fabric.device()), targets = batch.targets.to(fabric.device());
      model(tokens, targets).backward();
      sharded.zero_grad();
      const at::NoGradGuard no_grad;
      for (const int skipped : {3, 2}) {
        model->options.skipped = skipped;
        model(tokens, targets);
        std::vector<at::Tensor> others;
        for (const shard::FlatBuffer* buffer : sharded.engine().buffers()) {
          for (int i = 0; i < 2; ++i) {
            others.push_back(at::full({buffer->flat().total()}, 3.0f, on_device(fabric.device().index())));
          }
        }
        Device::at(fabric.device().index()).synchronize();
        for (const at::Tensor& other : others) EXPECT_TRUE(at::all(other.cpu() == 3).item<bool>()) << "seed " << seed;
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(SimEngine, ReplicasAreCompared) {
  for (uint64_t seed = 0; seed < seeds_of(4); ++seed) {
    restart({.seed = seed});
    run_on_devices(ranks, [&](comm::Fabric& fabric) {
      net::NetOptions options;
      net::Net model(options);
      net::fill_all(*model);
      shard::Options sharding;
      sharding.strategy = strategy(2, 2, 2, true, true);
      auto sharded = shard::shard_model(model, net::share(fabric), sharding);
      const auto batch = net::batch_of(options, 0, fabric.rank(), fabric.size());
      model(batch.tokens.to(fabric.device()), batch.targets.to(fabric.device())).backward();
      net::sgd(sharded, 0.1);
      EXPECT_TRUE(sharded.compare_replicas().suspects.empty()) << "seed " << seed;
      const at::NoGradGuard no_grad;
      if (fabric.rank() == 1) sharded.shards()[0].master.add_(1);
      EXPECT_FALSE(sharded.compare_replicas().suspects.empty()) << "seed " << seed;
    });
  }
}

// torch has 32 streams for all groups of a device: the 33rd group is in line behind the first, and where two ranks give
// these their tasks in other orders, each waits for the other. Collectives of lanes do not run there.
TEST_F(SimEngine, LanesAreIndependentHoweverManyGroupsThereAre) {
  run_on_devices(
      4,
      [](comm::Fabric& fabric) {
        std::vector<comm::Group*> groups;
        std::vector<int> members{0, 1, 2, 3};
        for (const auto traffic : {comm::Traffic::gather, comm::Traffic::reduce}) {
          do {
            groups.push_back(&fabric.group(members, traffic));
          } while (std::ranges::next_permutation(members).found);
        }
        ASSERT_EQ(groups.size(), 48u);
        const auto options = at::TensorOptions().device(fabric.device()).dtype(at::kFloat);
        const at::Tensor first = at::full({5}, 1, options), second = at::full({5}, 2, options);
        const auto gather = [&, group = groups[0]] { group->all_reduce(first); };
        const auto reduce = [&, group = groups[32]] { group->all_reduce(second); };
        std::vector<comm::Ticket> tickets;
        if (fabric.rank() % 2 == 0) tickets.push_back(fabric.lane(comm::Traffic::gather).submit(gather));
        tickets.push_back(fabric.lane(comm::Traffic::reduce).submit(reduce));
        if (fabric.rank() % 2 != 0) tickets.push_back(fabric.lane(comm::Traffic::gather).submit(gather));
        for (const auto& ticket : tickets) ticket.wait();
        EXPECT_TRUE(at::equal(first.cpu(), at::full({5}, 4.0f)));
        EXPECT_TRUE(at::equal(second.cpu(), at::full({5}, 8.0f)));
      },
      std::chrono::seconds(5));
}

// The first use of a group is a message of some of its members.
TEST_F(SimEngine, AnExchangeOfSomeMembersMayComeFirst) {
  run_on_devices(
      3,
      [](comm::Fabric& fabric) {
        auto& group = fabric.everyone();
        if (fabric.rank() == 2) return;
        const auto options = at::TensorOptions().device(fabric.device()).dtype(at::kFloat);
        const at::Tensor sent = at::full({5}, fabric.rank(), options), received = at::empty({5}, options);
        group.exchange({{1 - fabric.rank(), sent}}, {{1 - fabric.rank(), received}});
        EXPECT_TRUE(at::equal(received.cpu(), at::full({5}, static_cast<float>(1 - fabric.rank()))));
      },
      std::chrono::seconds(2));
}

}  // namespace tesserae::sim
