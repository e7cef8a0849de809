#include "tesserae/mesh/axes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

using ::testing::ElementsAre;

TEST(Axes, TensorRanksAreInnermost) {
  const Axes axes(12, 4);
  EXPECT_EQ(axes.data_ranks(), 3);
  EXPECT_EQ(axes.tensor_index(6), 2);
  EXPECT_EQ(axes.data_rank(6), 1);
  EXPECT_THAT(axes.tensor_group(6), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(axes.data_group(6), ElementsAre(2, 6, 10));
}

TEST(Axes, EachRankIsInItsGroupsAtItsPlace) {
  for (const int degree : {1, 2, 3, 6}) {
    const Axes axes(6, degree);
    for (int rank = 0; rank < 6; ++rank) {
      EXPECT_EQ(axes.tensor_group(rank)[static_cast<size_t>(axes.tensor_index(rank))], rank);
      EXPECT_EQ(axes.data_group(rank)[static_cast<size_t>(axes.data_rank(rank))], rank);
    }
  }
}

void expect_complaint(int ranks, int degree, const std::string& part) {
  try {
    Axes(ranks, degree);
    FAIL() << ranks << ", " << degree;
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
  }
}

TEST(Axes, ImpossibleDegreesNameTheNearest) {
  expect_complaint(12, 5, "nearest valid: 4 and 6");
  expect_complaint(12, 13, "nearest valid: 12");
  expect_complaint(12, 0, "nearest valid: 1");
  expect_complaint(0, 1, "no axes");
}

TEST(WorldOf, KeepsHosts) {
  const World job = World::joined(5, 8, false).with_hosts({"a", "a", "a", "a", "b", "b", "b", "b"});
  const World data = world_of(job, Axes(8, 2).data_group(5));
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
