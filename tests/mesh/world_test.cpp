#include "tesserae/mesh/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/mesh/mesh.h"
#include "tests/mesh/environment.h"

namespace tesserae::mesh {
namespace {

using ::testing::ElementsAre;

World from(const Environment& environment) {
  return World::from_environment(lookup_in(environment));
}

World launched_by_torchrun(int rank, int size, int local_size) {
  return from({{"RANK", std::to_string(rank)},
               {"WORLD_SIZE", std::to_string(size)},
               {"LOCAL_RANK", std::to_string(rank % local_size)},
               {"LOCAL_WORLD_SIZE", std::to_string(local_size)},
               {"MASTER_ADDR", "head"},
               {"MASTER_PORT", "29500"}});
}

std::vector<int> launcher_ranks(const World& world) {
  std::vector<int> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(world.launcher_rank(rank));
  return all;
}

std::vector<int> hosts(const World& world) {
  std::vector<int> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(world.host(rank));
  return all;
}

TEST(World, IsAloneWithoutALauncher) {
  const World world = from({});
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.hosts(), 1);
  EXPECT_THAT(world.host_ranks(0), ElementsAre(0));
}

TEST(World, TakesHostsForBlocksUntilItKnowsThem) {
  const World world = launched_by_torchrun(5, 8, 4);
  EXPECT_EQ(world.rank(), 5);
  EXPECT_EQ(world.hosts(), 2);
  EXPECT_THAT(hosts(world), ElementsAre(0, 0, 0, 0, 1, 1, 1, 1));
  EXPECT_THAT(world.host_ranks(6), ElementsAre(4, 5, 6, 7));
  EXPECT_EQ(launched_by_torchrun(0, 7, 4).hosts(), 2) << "the last host has fewer";
}

TEST(World, OrdersRanksByHostWhereTheLauncherDealtThemRoundRobin) {
  const std::vector<std::string> dealt{"a", "b", "c", "a", "b", "c", "a", "b"};
  for (int launched = 0; launched < 8; ++launched) {
    const World world = launched_by_torchrun(launched, 8, 1).with_hosts(dealt);
    EXPECT_THAT(launcher_ranks(world), ElementsAre(0, 3, 6, 1, 4, 7, 2, 5));
    EXPECT_THAT(hosts(world), ElementsAre(0, 0, 0, 1, 1, 1, 2, 2));
    EXPECT_EQ(world.hosts(), 3);
    EXPECT_EQ(world.launcher_rank(world.rank()), launched);
    EXPECT_EQ(world.launch().rank, launched);
    EXPECT_THAT(world.host_ranks(4), ElementsAre(3, 4, 5));
    EXPECT_THAT(world.host_ranks(7), ElementsAre(6, 7));
  }
}

TEST(World, HostsCountInOrderOfTheirLowestRankWhateverTheirNames) {
  const World world = launched_by_torchrun(0, 4, 2).with_hosts({"z", "z", "a", "a"});
  EXPECT_THAT(launcher_ranks(world), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(hosts(world), ElementsAre(0, 0, 1, 1));
}

TEST(World, LearningTheHostsTwiceChangesNothing) {
  const std::vector<std::string> labels{"a", "b", "a", "b"};
  const World once = launched_by_torchrun(1, 4, 2).with_hosts(labels);
  const World twice = once.with_hosts(labels);
  EXPECT_EQ(launcher_ranks(once), launcher_ranks(twice));
  EXPECT_EQ(once.rank(), twice.rank());
  EXPECT_EQ(once.rank(), 2);
}

TEST(World, RefusesLabelsForAnotherNumberOfRanks) {
  EXPECT_THROW(launched_by_torchrun(0, 4, 2).with_hosts({"a", "a", "b"}), InvalidArgument);
}

TEST(World, SingleHost) {
  const World world = World::single_host(2, 4);
  EXPECT_EQ(world.rank(), 2);
  EXPECT_EQ(world.launch().local_rank, 2);
  EXPECT_EQ(world.hosts(), 1);
  EXPECT_THAT(world.host_ranks(0), ElementsAre(0, 1, 2, 3));
  EXPECT_THROW(World::single_host(4, 4), InvalidArgument);
  EXPECT_THROW(World::single_host(0, 0), InvalidArgument);
}

TEST(WorldOf, KeepsHosts) {
  const World job = World::joined(5, 8, false).with_hosts({"a", "a", "a", "a", "b", "b", "b", "b"});
  const World data = world_of(job, Mesh(8, {.tensor = 2}).members(axes::state, 5));
  EXPECT_EQ(data.size(), 4);
  EXPECT_EQ(data.rank(), 2);
  EXPECT_EQ(data.hosts(), 2);
  EXPECT_THAT(data.host_ranks(2), ElementsAre(2, 3));
  EXPECT_THROW(world_of(job, {0, 1}), InvalidArgument) << "this rank is no member";
  EXPECT_THROW(world_of(job, {7, 5}), InvalidArgument) << "not ascending";
  EXPECT_THROW(world_of(job, {5, 8}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::mesh
