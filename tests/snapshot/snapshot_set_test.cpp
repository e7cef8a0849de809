#include "tesserae/snapshot/snapshot_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tesserae::snapshot {
namespace {

using testing::ElementsAre;

constexpr Held none{};

mesh::Mesh job(const mesh::Layout& layout, int tensor) {
  return mesh::Mesh(layout.ranks() * tensor, {.tensor = tensor});
}

TEST(SnapshotSet, NeighboursOwnTheSameChunkInAnotherReplica) {
  for (const int ranks : {1, 2, 3, 4, 6, 8, 12}) {
    for (const mesh::Degrees& degrees : mesh::all_degrees(ranks)) {
      const mesh::Layout layout(ranks, degrees);
      for (int rank = 0; rank < ranks; ++rank) {
        const int other = neighbour(job(layout, 1), layout, rank);
        if (layout.replicas() == 1) {
          EXPECT_EQ(other, -1);
          continue;
        }
        EXPECT_EQ(layout.chunk(other), layout.chunk(rank));
        EXPECT_NE(layout.replica(other), layout.replica(rank));
        EXPECT_EQ(neighbour(job(layout, 1), layout, other, -1), rank);
        EXPECT_EQ(layout.parameter_piece(other), layout.parameter_piece(rank)) << "what has no master is there too";
      }
    }
  }
}

TEST(SnapshotSet, IsCompleteWhenAllTensorParallelRanksAreThere) {
  const mesh::Layout layout(2, {1, 1, 1});
  const std::array<Held, buffers_per_rank> full{Held{7, 12}, none}, empty{none, none};
  const auto set = newest_complete_set(job(layout, 2), layout, {full, full, full, empty}, 0);
  ASSERT_TRUE(set.has_value());
  EXPECT_EQ(set->buffer, (std::vector<int>{0, 0, 0, -1}));
  EXPECT_FALSE(newest_complete_set(job(layout, 2), layout, {full, empty, full, empty}, 0).has_value());
}

TEST(SnapshotSet, NeighboursHaveTheSamePartsOfSplitTensors) {
  const mesh::Layout layout(4, {1, 1, 2});
  for (int rank = 0; rank < 12; ++rank) {
    const int other = neighbour(job(layout, 3), layout, rank);
    EXPECT_EQ(other % 3, rank % 3);
    EXPECT_EQ(other / 3, neighbour(job(layout, 1), layout, rank / 3));
  }
}

// Eight ranks, two of whom share out experts: rank s has expert index s mod 2 and is number s / 2 of its four.
TEST(SnapshotSet, NeighboursHaveTheSameExperts) {
  const auto next = [](const mesh::Degrees& degrees, int expert, int rank) {
    return neighbour(mesh::Mesh(8, {.expert = expert}), mesh::Layout(8, degrees), rank);
  };
  EXPECT_EQ(next({1, 1, 1}, 2, 0), 2) << "the next with this index";
  EXPECT_EQ(next({1, 1, 1}, 2, 7), 1);
  EXPECT_EQ(next({1, 1, 1}, 8, 3), -1) << "each expert is on one rank";
  EXPECT_EQ(next({2, 2, 2}, 2, 1), 5) << "rank 3 has the same chunk of the rest, and another of its experts";
  EXPECT_EQ(next({4, 4, 4}, 2, 1), -1) << "rank 5 has the other half of the experts";
  EXPECT_EQ(next({4, 4, 4}, 1, 1), 5);
  const mesh::Mesh mesh(8, {.expert = 2});
  EXPECT_THAT(holders(mesh, mesh::Layout(8, {2, 2, 2}), 1, false), ElementsAre(1, 3, 5, 7));
  EXPECT_THAT(holders(mesh, mesh::Layout(8, {2, 2, 2}), 1, true), ElementsAre(1, 5));
}

TEST(SnapshotSet, IsTheLatestThatAllRanksHold) {
  const mesh::Layout layout(2, {2, 2, 2});
  // Rank 1 was killed while it wrote step 12.
  const HeldByRank held = {{{{7, 12}, {7, 10}}}, {{none, {7, 10}}}};
  const auto set = newest_complete_set(job(layout, 1), layout, held, 0);
  ASSERT_TRUE(set.has_value());
  EXPECT_EQ(set->step, 10);
  EXPECT_THAT(set->buffer, ElementsAre(1, 1));
  EXPECT_TRUE(newest_complete_set(job(layout, 1), layout, held, 10).has_value());
  EXPECT_FALSE(newest_complete_set(job(layout, 1), layout, held, 11).has_value()) << "storage has a later one";
}

TEST(SnapshotSet, JobsAreNotMixed) {
  const mesh::Layout layout(2, {2, 2, 2});
  EXPECT_FALSE(newest_complete_set(job(layout, 1), layout, {{{{7, 12}, none}}, {{{8, 12}, none}}}, 0).has_value());
  // Job 8 went on from step 10 of job 7 and did not come to a save on all ranks.
  const auto set = newest_complete_set(job(layout, 1), layout, {{{{7, 10}, {8, 11}}}, {{{7, 10}, {7, 12}}}}, 0);
  ASSERT_TRUE(set.has_value());
  EXPECT_EQ(set->session, 7);
  EXPECT_EQ(set->step, 10);
}

TEST(SnapshotSet, ANeighbourStandsInForWhoLostItsPart) {
  const mesh::Layout layout(4, {2, 2, 2});  // replicas {0, 1} and {2, 3}
  const std::array<Held, buffers_per_rank> full{{{7, 12}, {7, 10}}}, empty{};
  const auto set = newest_complete_set(job(layout, 1), layout, {full, empty, empty, full}, 0);
  ASSERT_TRUE(set.has_value());
  EXPECT_EQ(set->step, 12);
  EXPECT_THAT(set->buffer, ElementsAre(0, -1, -1, 0));
  EXPECT_FALSE(newest_complete_set(job(layout, 1), layout, {full, empty, full, empty}, 0).has_value())
      << "chunk 1 is nowhere";
}

TEST(SnapshotSet, NobodyHoldsAnything) {
  EXPECT_FALSE(newest_complete_set(mesh::Mesh(3), mesh::Layout(3, {1, 3, 3}), HeldByRank(3), -1).has_value());
}

}  // namespace
}  // namespace tesserae::snapshot
