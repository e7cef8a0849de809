// A rank is lost while others wait for it on their devices. What a collective leaves there that was cut off is their
// own part, and looks like a result.

#include <ATen/ATen.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "tesserae/comm/agree.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/group_table.h"
#include "tesserae/comm/liveness/liveness.h"
#include "tesserae/comm/liveness/liveness_store.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/comm/transports/c10d_group.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/os/clock.h"
#include "tests/shard/net.h"
#include "tests/sim/fixture.h"
#include "tests/sim/process_group.h"

namespace tesserae::sim {
namespace {

namespace net = shard::testing;

/// What ranks that are threads share: where they meet, and where they hear of each other.
struct Place {
  static constexpr std::chrono::seconds deadline{60};

  const int ranks;
  const int lost = ranks - 1;
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Room>> rooms;
  std::atomic<int> waiting = 0;  ///< of those that are left: who is about to wait for the one that is lost
  std::atomic<int> done = 0;     ///< who needs it no more

  explicit Place(int count) : ranks(count) {
    for (int rank = 0; rank < ranks; ++rank) comm::Liveness::introduce(rank, store);
  }
  std::shared_ptr<Room> room(const std::string& name, size_t size) {
    const std::lock_guard lock(mutex);
    auto& room = rooms[name];
    if (!room) room = std::make_shared<Room>(name, static_cast<int>(size));
    return room;
  }
  std::vector<std::string> hosts() const {
    std::vector<std::string> names;
    for (int rank = 0; rank < ranks; ++rank) names.push_back(cat("host", rank));
    return names;
  }
  void report_lost() const { comm::LivenessStore(store).report_lost(lost); }
  /// As Fabric::reconnect() does first, on a rank that heard of it.
  void give_up(int rank) const { comm::LivenessStore(store).report_left(rank, /*gives_up=*/true); }
  /// Of the rank that is lost, which takes part in nothing any more.
  void lose() {
    while (waiting + done < ranks - 1) os::sleep_for(std::chrono::milliseconds(1));
    report_lost();
    stay();
  }
  void stay() const {
    while (done < ranks - 1) os::sleep_for(std::chrono::milliseconds(10));
  }
};

/// Rank r on device r of a host of its own, with a liveness channel as a job of processes has.
class WatchedFabric final : public comm::Fabric {
 public:
  WatchedFabric(Place& place, int rank)
      : place_(place),
        world_(mesh::World::joined(rank, place.ranks, /*served=*/true).with_hosts(place.hosts())),
        device_(sim::device(static_cast<c10::DeviceIndex>(rank))),
        liveness_(world_, place.store, /*server=*/-1),
        table_(rank, place.ranks, comm::Lane::Kind::stream, device_) {}
  ~WatchedFabric() override { table_.clear(); }

  const mesh::World& world() const override { return world_; }
  c10::Device device() const override { return device_; }
  comm::Group& group(const std::vector<int>& members, comm::Traffic traffic) override {
    return table_.group(members, traffic, [this](std::string name, const std::vector<int>& members, int rank) {
      auto backend = c10::make_intrusive<ProcessGroup>(place_.room(name, members.size()), rank, device_.index(),
                                                       ProcessGroup::Options{.deadline = Place::deadline});
      backend->setBoundDeviceId(device_);
      const comm::C10dGroup::Options options{.deadline = Place::deadline, .liveness = &liveness_, .connects = true};
      return std::make_unique<comm::C10dGroup>(std::move(name), members, std::move(backend), options);
    });
  }
  comm::Lane& lane(comm::Traffic traffic) override { return table_.lane(traffic); }
  comm::Counters counters() const override { return table_.counters(); }

 protected:
  comm::GroupTable* table() const override { return &table_; }

 private:
  Place& place_;
  const mesh::World world_;
  const c10::Device device_;
  comm::Liveness liveness_;
  mutable comm::GroupTable table_;
};

class SimLostRank : public Sim {
 protected:
  static constexpr int ranks = 3;
  static constexpr int lost = ranks - 1;

  /// `body` as ranks that are threads; the last of them is the one that is lost.
  static void run(const std::function<void(comm::Fabric& fabric, Place& place)>& body, int count = ranks) {
    Place place(count);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, rank] {
        const auto index = static_cast<c10::DeviceIndex>(rank);
        const c10::DeviceGuard here(device(index));
        try {
          WatchedFabric fabric(place, rank);
          body(fabric, place);
          Device::at(index).synchronize();
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
        if (rank != place.lost) ++place.done;
      });
    }
    for (auto& thread : threads) thread.join();
  }

  /// A step of all ranks, then one in which the others wait for the norm when the last is lost.
  static void lose_one_in_a_step(comm::Fabric& fabric, Place& place, int tensor) {
    net::NetOptions options;
    net::Net model(options);
    net::fill_all(*model);
    shard::Options sharding;
    sharding.mesh =
        std::make_shared<comm::MeshFabric>(net::share(fabric), mesh::Mesh(fabric.size(), {.tensor = tensor}));
    const std::shared_ptr<comm::Fabric> state = sharding.mesh->over(mesh::axes::state);
    sharding.strategy = mesh::preset("FULL_SHARD", state->size());
    auto sharded = shard::shard_model(model, state, sharding);
    optim::AdamW optimizer(sharded, optim::AdamWOptions{.lr = 1e-2});
    const auto batch = net::batch_of(options, 0, state->rank(), state->size(), 2 * state->size());
    const auto backward = [&] {
      model(batch.tokens.to(fabric.device()), batch.targets.to(fabric.device())).backward();
    };
    backward();
    const double norm = optimizer.step().norm;
    EXPECT_GT(norm, 0);
    EXPECT_EQ(comm::max_over_ranks(fabric, norm), norm);
    optimizer.zero_grad();
    backward();
    if (fabric.rank() == place.lost) return place.lose();
    std::vector<at::Tensor> before;
    for (const auto& shard : sharded.shards()) before.push_back(shard.master.clone());
    std::vector<double> sums{1};
    ++place.waiting;
    EXPECT_EQ(lost_according_to([&] { optimizer.step({.clip_norm = 0.5, .also_sum = &sums}); }),
              std::vector<int>{place.lost});
    place.give_up(fabric.rank());
    EXPECT_EQ(optimizer.steps_done(), 1) << "only the one before";
    EXPECT_EQ(sums, std::vector<double>{1}) << "no sum";
    size_t i = 0;
    for (const auto& shard : sharded.shards()) EXPECT_TRUE(at::equal(shard.master, before[i++])) << "shard " << i;
  }

  template <class Call>
  static std::vector<int> lost_according_to(const Call& call) {
    try {
      call();
    } catch (const comm::PeerLost& error) {
      return error.ranks;
    }
    return {};
  }
};

}  // namespace

// With the norm a step has counted, and recovery keeps it.
TEST_F(SimLostRank, WhoWaitsForTheNormHasMadeNoStep) {
  run([](comm::Fabric& fabric, Place& place) { lose_one_in_a_step(fabric, place, /*tensor=*/1); });
}

// Rank 0 has no group with rank 3: it would hear of the norm from rank 1, which has.
TEST_F(SimLostRank, WhoHearsOfTheNormFromThemHasMadeNoStep) {
  constexpr int count = 4;
  run([](comm::Fabric& fabric, Place& place) { lose_one_in_a_step(fabric, place, /*tensor=*/2); }, count);
}

TEST_F(SimLostRank, WhatRanksTellEachOtherIsNotTheirOwnPartOfIt) {
  run([](comm::Fabric& fabric, Place& place) {
    EXPECT_EQ(comm::sum_over_ranks(fabric, 1), ranks);
    if (fabric.rank() == lost) return place.lose();
    ++place.waiting;
    EXPECT_EQ(lost_according_to([&] { comm::from_all_ranks(fabric, 1); }), std::vector<int>{lost});
    EXPECT_EQ(lost_according_to([&] { comm::counts_over_ranks(fabric, {1}); }), std::vector<int>{lost});
    EXPECT_EQ(lost_according_to([&] { fabric.everyone().require_intact(); }), std::vector<int>{lost});
  });
}

TEST_F(SimLostRank, ABarrierThatWasCutOffIsNone) {
  run([](comm::Fabric& fabric, Place& place) {
    fabric.everyone().barrier();
    if (fabric.rank() == lost) return place.lose();
    ++place.waiting;
    EXPECT_EQ(lost_according_to([&] { fabric.everyone().barrier(); }), std::vector<int>{lost});
  });
}

// A group without the lost rank: who waits there is waited for by nobody once the others have given up.
TEST_F(SimLostRank, AGroupThatHasNotLostAMemberEndsWhenOthersGiveUp) {
  run([](comm::Fabric& fabric, Place& place) {
    comm::Group* pair = nullptr;
    if (fabric.rank() != lost) pair = &fabric.group({0, 1}, comm::Traffic::reduce);
    fabric.everyone().barrier();
    if (fabric.rank() == lost) return place.stay();
    if (fabric.rank() == 1) {
      place.report_lost();
      return place.give_up(1);
    }
    const at::Tensor sum = at::ones({1}, at::TensorOptions().device(fabric.device()));
    EXPECT_EQ(lost_according_to([&] {
                pair->all_reduce(sum);
                pair->to_host(sum);
              }),
              std::vector<int>{lost});
  });
}

}  // namespace tesserae::sim
