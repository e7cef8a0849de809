#include "tesserae/comm/fabric.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <csignal>
#include <exception>
#include <functional>
#include <utility>

#include "tesserae/comm/error.h"
#include "tesserae/comm/transports/nccl.h"
#include "tests/support/ranks.h"

namespace tesserae::comm {

namespace {

using tesserae::testing::RankJob;
using tesserae::testing::report;
using tesserae::testing::run_ranks;
using ::testing::ElementsAre;

// What a user's function throws: his own type, which nothing here knows.
struct NoSuchBackend : std::exception {
  const char* what() const noexcept override { return "nobody registered one"; }
};

FabricOptions cuda_by(std::function<c10::intrusive_ptr<c10d::Backend>(const DeviceGroup&)> make) {
  FabricOptions options;
  options.device = c10::Device(c10::kCUDA, 0);
  options.make_backend = std::move(make);
  return options;
}

}  // namespace

RANK_MAIN(sits_on_two_hosts_in_turn) {
  const auto world = mesh::World::from_environment();
  FabricOptions options;
  options.host = world.rank() % 2 == 0 ? "even" : "odd";
  const auto fabric = Fabric::connect(world, options);
  EXPECT_EQ(fabric->world().hosts(), 2);
  EXPECT_EQ(fabric->world().launcher_rank(fabric->rank()), world.rank());
  report("rank", fabric->rank());
  const auto mine = fabric->world().host_ranks(fabric->rank());
  auto& neighbours = fabric->group(mine, Traffic::control);
  auto sum = at::zeros({1}, at::kLong).fill_(world.rank());
  neighbours.all_reduce(sum);
  report("sum", sum.item<double>());
}

RANK_MAIN(waits_for_all) {
  FabricOptions options;
  options.connect_deadline = std::chrono::seconds(3);
  try {
    Fabric::connect(mesh::World::from_environment(), options);
    report("missing", -1);
  } catch (const Timeout& timeout) {
    report("missing", timeout.silent.empty() ? -2 : timeout.silent.front());
  }
}

// The host gives no shared memory: Gloo carries the same bytes, and one rank says so.
RANK_MAIN(has_no_room_to_share) {
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit none{4096, 4096};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
  const auto fabric = Fabric::connect(mesh::World::from_environment());
  auto sum = at::zeros({1 << 16}, at::kFloat).fill_(fabric->rank() + 1);
  fabric->everyone().all_reduce(sum);
  EXPECT_EQ(sum.min().item<double>(), 6);
  EXPECT_EQ(sum.max().item<double>(), 6);
  EXPECT_FALSE(fabric->everyone().share(1 << 16).defined());
  auto& pair = fabric->group(fabric->rank() < 2 ? std::vector<int>{0, 1} : std::vector<int>{2}, Traffic::gather);
  auto gathered = at::zeros({pair.size()}, at::kFloat);
  gathered[pair.rank()] = 5;
  pair.all_gather(gathered);
  EXPECT_EQ(gathered.sum().item<double>(), 5 * pair.size());
}

TEST(Fabric, FallsBackToGlooWithOneLineWhereNoMemoryIsShared) {
  const auto results = run_ranks("has_no_room_to_share", 3);
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  const std::string line = "ranks of this host cannot share memory, Gloo carries all bytes (rank 0: ";
  size_t lines = 0;
  for (size_t at = 0; (at = results.text().find(line, at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 1u) << results.text();
}

TEST(Fabric, OrdersRanksByHost) {
  const auto results = run_ranks("sits_on_two_hosts_in_turn", 4);
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  const double rank_of_launcher[] = {0, 2, 1, 3};
  for (int launcher = 0; launcher < 4; ++launcher) {
    EXPECT_EQ(results[launcher].value("rank"), rank_of_launcher[launcher]);
    EXPECT_EQ(results[launcher].value("sum"), launcher % 2 == 0 ? 0 + 2 : 1 + 3);
  }
}

TEST(Fabric, NamesTheRankThatDidNotCome) {
  RankJob job;
  job.main = "waits_for_all";
  job.ranks = 2;
  job.environment = {{"WORLD_SIZE", "3"}, {"LOCAL_WORLD_SIZE", "3"}};
  const auto results = run_ranks(job);
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  EXPECT_EQ(results[0].value("missing"), 2) << results.text();
}

TEST(Fabric, OneProcessNeedsNobody) {
  const auto fabric = Fabric::connect(mesh::World::single_host(0, 1));
  const auto buffer = at::zeros({5}).fill_(3);
  fabric->everyone().all_reduce(buffer);
  EXPECT_EQ(buffer.sum().item<double>(), 15);
  EXPECT_EQ(fabric->lane(Traffic::gather).kind(), Lane::Kind::immediate);
  EXPECT_EQ(fabric->counters().bytes(), 0u);
}

TEST(Fabric, RefusesABackendThatDoesNotFit) {
  FabricOptions options;
  options.backend = "glue";
  EXPECT_THROW(Fabric::connect(mesh::World::single_host(0, 1), options), InvalidArgument);
  options.backend = "nccl";
  EXPECT_THROW(Fabric::connect(mesh::World::single_host(0, 1), options), InvalidArgument);
}

RANK_MAIN(is_given_a_maker_of_groups) {
  const auto world = mesh::World::from_environment();
  int asked = 0;
  const auto fabric =
      Fabric::connect(world, cuda_by([&](const DeviceGroup& group) -> c10::intrusive_ptr<c10d::Backend> {
                        EXPECT_EQ(group.members, (std::vector<int>{0, 1}));
                        if (++asked > 1) throw NoSuchBackend();
                        throw InvalidArgument("make_group", "there is no such backend");
                      }));
  EXPECT_THROW(fabric->everyone(), InvalidArgument);
  EXPECT_THROW(fabric->everyone(), NoSuchBackend);
  EXPECT_EQ(asked, 2);
}

TEST(Fabric, MakesGroupsOfCudaAsItIsToldWhereTheBuildHasNone) {
  if (has_nccl()) return;  // which carries them: tests/device/nccl_test.cpp
  const auto results = run_ranks("is_given_a_maker_of_groups", 2);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

// In a store, and among processes: what a group of that name has left there is not taken for the next one's.
RANK_MAIN(borrows_groups) {
  FabricOptions options;
  options.backend = args.at(0);
  const auto fabric = Fabric::connect(mesh::World::from_environment(), options);
  fabric->group({0, 1}, Traffic::reduce);
  fabric->everyone();
  const int kept = fabric->group_count();
  uint64_t calls = 0;
  for (int round = 0; round < 3; ++round) {
    std::shared_ptr<Group> group = fabric->borrow({0, 1}, Traffic::gather);
    EXPECT_EQ(fabric->borrow({0, 1}, Traffic::gather), group);
    const auto sum = at::zeros({5}).fill_(fabric->rank() + 1);
    group->all_reduce(sum);
    EXPECT_EQ(sum.sum().item<double>(), 15) << "round " << round;
    EXPECT_EQ(fabric->release_unused(), 0) << "it is held";
    EXPECT_EQ(fabric->group_count(), kept + 1);
    group = nullptr;
    EXPECT_EQ(fabric->group_count(), kept + 1) << "until all of them say so";
    EXPECT_EQ(fabric->release_unused(), 1);
    EXPECT_EQ(fabric->group_count(), kept);
    EXPECT_GT(fabric->counters().calls(), calls) << "what ended is counted";
    calls = fabric->counters().calls();
  }
  const auto borrowed = fabric->borrow({0, 1}, Traffic::reduce);
  EXPECT_EQ(fabric->release_unused(), 0) << "somebody has asked for it for good";
}

TEST(Fabric, BorrowedGroupsEndAndAreMadeAnew) {
  for (const char* backend : {"shm", "gloo"}) {
    const auto results = run_ranks("borrows_groups", 2, {backend});
    EXPECT_TRUE(results.all_succeeded()) << backend << "\n" << results.text();
  }
}

TEST(NullFabric, CountsWhatAThousandRanksWouldSend) {
  const auto fabric = Fabric::null(mesh::World::single_host(3, 1000));
  auto& group = fabric->everyone();
  EXPECT_FALSE(group.blocks_host());
  group.all_gather(at::zeros({1000}));
  group.reduce_scatter(at::zeros({2000}));
  EXPECT_EQ(group.counters().all_gather.bytes, 4u * 999);
  EXPECT_EQ(group.counters().reduce_scatter.bytes, 8u * 999);
  EXPECT_EQ(fabric->counters().calls(), 2u);
}

TEST(NullFabric, RefusesGroupsThatCanNotBe) {
  const auto fabric = Fabric::null(mesh::World::single_host(1, 4));
  EXPECT_THROW(fabric->group({0, 2}, Traffic::gather), InvalidArgument) << "this rank is no member";
  EXPECT_THROW(fabric->group({1, 4}, Traffic::gather), InvalidArgument);
  EXPECT_THROW(fabric->group({}, Traffic::gather), InvalidArgument);
}

TEST(NullFabric, NumbersMembersInTheOrderGiven) {
  const auto fabric = Fabric::null(mesh::World::single_host(1, 4));
  const auto& group = fabric->group({3, 1, 0}, Traffic::reduce);
  EXPECT_EQ(group.rank(), 1);
  EXPECT_THAT(group.members(), ElementsAre(3, 1, 0));
}

TEST(NullFabric, NamesGroupsApartAndThoseOfManyRanksBriefly) {
  const auto fabric = Fabric::null(mesh::World::single_host(0, 1024));
  const auto every = [](int distance) {
    std::vector<int> members;
    for (int rank = 0; rank < 1024; rank += distance) members.push_back(rank);
    return members;
  };
  EXPECT_EQ(fabric->group({0, 2, 5}, Traffic::control).name(), "control.0-2-5");
  EXPECT_EQ(fabric->group(every(1), Traffic::gather).name(), "gather.0-1-...-1023");
  EXPECT_EQ(fabric->group(every(8), Traffic::reduce).name(), "reduce.0-8-...-1016");
  auto uneven = every(1);
  uneven.erase(uneven.begin() + 500);
  EXPECT_NE(fabric->group(uneven, Traffic::gather).name(), fabric->group(every(1), Traffic::gather).name());
}

}  // namespace tesserae::comm
