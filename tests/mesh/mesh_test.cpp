#include "tesserae/mesh/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

using ::testing::ElementsAre;
using Group = std::vector<int>;
using Groups = std::vector<Group>;  // by rank

/// What each rank must find, written out by hand.
void expect_table(const Mesh& mesh, const std::vector<std::pair<AxisSet, Groups>>& table) {
  for (const auto& [axes, expected] : table) {
    ASSERT_EQ(static_cast<int>(expected.size()), mesh.ranks());
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      SCOPED_TRACE(cat(to_string(axes), ", rank ", rank));
      const Group& group = expected[static_cast<size_t>(rank)];
      EXPECT_EQ(mesh.members(axes, rank), group);
      EXPECT_EQ(mesh.degree(axes), static_cast<int>(group.size()));
      ASSERT_LT(mesh.index(axes, rank), static_cast<int>(group.size()));
      EXPECT_EQ(group[static_cast<size_t>(mesh.index(axes, rank))], rank);
      EXPECT_EQ(mesh.is_first(axes, rank), rank == group.front());
    }
  }
}

/// rank = t + 2 c + 4 d:    t  c  d  e  x
///                     0    0  0  0  0  0
///                     1    1  0  0  0  0
///                     2    0  1  0  1  0
///                     3    1  1  0  1  0
///                     4    0  0  1  0  1
///                     5    1  0  1  0  1
///                     6    0  1  1  1  1
///                     7    1  1  1  1  1
TEST(Mesh, FourAxesOfTwoOnEightRanks) {
  const Mesh mesh(8, {.tensor = 2, .context = 2, .expert = 2});
  const Groups pairs{{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4, 5}, {4, 5}, {6, 7}, {6, 7}};
  const Groups second{{0, 2}, {1, 3}, {0, 2}, {1, 3}, {4, 6}, {5, 7}, {4, 6}, {5, 7}};
  const Groups third{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}};
  const Group even{0, 2, 4, 6}, odd{1, 3, 5, 7};
  const Groups alternating{even, odd, even, odd, even, odd, even, odd};
  const Group low{0, 1, 2, 3}, high{4, 5, 6, 7};
  const Groups halves{low, low, low, low, high, high, high, high};
  const Group outer_first{0, 1, 4, 5}, outer_second{2, 3, 6, 7};
  const Groups outer{outer_first, outer_first, outer_second, outer_second,
                     outer_first, outer_first, outer_second, outer_second};
  const Groups all(8, {0, 1, 2, 3, 4, 5, 6, 7});
  expect_table(mesh, {{Axis::tensor, pairs},
                      {Axis::context, second},
                      {Axis::data, third},
                      {Axis::expert, second},
                      {Axis::expert_data, third},
                      {{Axis::tensor, Axis::context}, halves},
                      {{Axis::tensor, Axis::data}, outer},
                      {{Axis::context, Axis::data}, alternating},
                      {{Axis::tensor, Axis::expert}, halves},
                      {{Axis::tensor, Axis::expert_data}, outer},
                      {{Axis::expert, Axis::expert_data}, alternating},
                      {{Axis::tensor, Axis::expert, Axis::expert_data}, all},
                      {axes::tensor, pairs},
                      {axes::state, alternating},
                      {axes::expert_state, third},
                      {axes::batch, third},
                      {axes::loss, alternating},
                      {axes::job, all}});
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(mesh.writes_unsplit(rank), rank % 2 == 0) << rank;
  EXPECT_EQ(to_string(mesh), "8 ranks = tensor 2 x context 2 x data 2 = tensor 2 x expert 2 x expert_data 2");
}

TEST(Mesh, ExpertsAreASecondWayToCutTheSameRanks) {
  const Mesh mesh(8, {.context = 4, .expert = 2});
  const Group low{0, 1, 2, 3}, high{4, 5, 6, 7}, even{0, 2, 4, 6}, odd{1, 3, 5, 7};
  expect_table(mesh, {{Axis::tensor, {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}},
                      {Axis::context, {low, low, low, low, high, high, high, high}},
                      {axes::batch, {{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}}},
                      {axes::state, Groups(8, {0, 1, 2, 3, 4, 5, 6, 7})},
                      {Axis::expert, {{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4, 5}, {4, 5}, {6, 7}, {6, 7}}},
                      {axes::expert_state, {even, odd, even, odd, even, odd, even, odd}}});
  EXPECT_EQ(to_string(mesh), "8 ranks = context 4 x data 2 = expert 2 x expert_data 4");
}

TEST(Mesh, DegreesMayBeOneOrAll) {
  const Mesh one(1);
  for (const Axis axis : {Axis::tensor, Axis::context, Axis::data, Axis::expert, Axis::expert_data}) {
    EXPECT_EQ(one.degree(axis), 1);
    EXPECT_EQ(one.index(axis, 0), 0);
    EXPECT_THAT(one.members(axis, 0), ElementsAre(0));
  }
  EXPECT_EQ(to_string(one), "1 rank = data 1");
  const Mesh experts(4, {.expert = 4});
  EXPECT_THAT(experts.members(axes::expert_state, 2), ElementsAre(2));
  EXPECT_THAT(experts.members(Axis::expert, 2), ElementsAre(0, 1, 2, 3));
  const Mesh tensor(4, {.tensor = 4});
  EXPECT_EQ(tensor.degree(axes::state), 1);
  EXPECT_EQ(to_string(tensor), "4 ranks = tensor 4 x data 1");
}

TEST(Mesh, TensorRanksAreInnermost) {
  const Mesh mesh(12, {.tensor = 4});
  EXPECT_EQ(mesh.degree(axes::state), 3);
  EXPECT_EQ(mesh.index(axes::tensor, 6), 2);
  EXPECT_EQ(mesh.index(axes::state, 6), 1);
  EXPECT_THAT(mesh.members(axes::tensor, 6), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(mesh.members(axes::state, 6), ElementsAre(2, 6, 10));
}

TEST(Mesh, EachRankIsInItsGroupsAtItsPlace) {
  for (const int degree : {1, 2, 3, 6}) {
    const Mesh mesh(6, {.tensor = degree});
    for (int rank = 0; rank < 6; ++rank) {
      EXPECT_EQ(mesh.members(axes::tensor, rank)[static_cast<size_t>(mesh.index(axes::tensor, rank))], rank);
      EXPECT_EQ(mesh.members(axes::state, rank)[static_cast<size_t>(mesh.index(axes::state, rank))], rank);
    }
  }
}

/// Any mesh, by definition: the members of a set of axes differ from a rank on these only, and nobody is left out.
TEST(Mesh, MembersDifferOnTheirAxesOnly) {
  const std::vector<AxisSet> sets{Axis::tensor, Axis::context, axes::state, {Axis::tensor, Axis::data}, axes::job};
  for (const int tensor : {1, 2, 3}) {
    for (const int context : {1, 2, 4}) {
      const Mesh mesh(24, {.tensor = tensor, .context = context});
      for (const AxisSet& set : sets) {
        for (int rank = 0; rank < 24; ++rank) {
          Group expected;
          for (int other = 0; other < 24; ++other) {
            bool same = true;
            for (const Axis axis : axes::job.list()) {
              same = same && (set.has(axis) || mesh.index(axis, rank) == mesh.index(axis, other));
            }
            if (same) expected.push_back(other);
          }
          ASSERT_EQ(mesh.members(set, rank), expected) << to_string(mesh) << ", " << to_string(set);
        }
      }
    }
  }
}

void expect_complaint(int ranks, const AxisDegrees& degrees, const std::string& part) {
  try {
    const Mesh mesh(ranks, degrees);
    FAIL() << to_string(mesh);
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
  }
}

TEST(Mesh, ImpossibleDegreesNameTheNearest) {
  expect_complaint(12, {.tensor = 5}, "nearest valid: 4 and 6");
  expect_complaint(12, {.tensor = 13}, "nearest valid: 12");
  expect_complaint(12, {.tensor = 0}, "nearest valid: 1");
  expect_complaint(0, {.tensor = 1}, "no axes");
  expect_complaint(12, {.tensor = 2, .context = 4},
                   "a context-parallel degree of 4 does not divide the 6 ranks that "
                   "12 ranks / tensor 2 leave; nearest valid: 3 and 6");
  expect_complaint(12, {.context = 2, .expert = 8}, "an expert-parallel degree of 8 does not divide the 12 ranks");
  expect_complaint(12, {.context = -1}, "nearest valid: 1");
}

TEST(Mesh, RefusesRanksThatTheJobDoesNotHave) {
  const Mesh mesh(4, {.tensor = 2});
  EXPECT_THROW(mesh.index(axes::tensor, 4), InvalidArgument);
  EXPECT_THROW(mesh.index(axes::state, -1), InvalidArgument);
  EXPECT_THROW(mesh.members(axes::state, 4), InvalidArgument);
  EXPECT_THROW(mesh.writes_unsplit(4), InvalidArgument);
}

TEST(Axis, HasAName) {
  for (const std::string& name : axis_names()) {
    const auto axis = axis_from_name(name);
    ASSERT_TRUE(axis) << name;
    EXPECT_EQ(to_string(*axis), name);
  }
  EXPECT_THAT(axis_names(), ElementsAre("tensor", "context", "data", "expert", "expert_data"));
  EXPECT_FALSE(axis_from_name("Tensor"));
  EXPECT_FALSE(axis_from_name(""));
}

TEST(Axis, SetsAreOfOneWayToCutTheRanks) {
  EXPECT_EQ((AxisSet{Axis::data, Axis::context}), axes::state) << "the order does not count";
  EXPECT_EQ(to_string(AxisSet{Axis::data, Axis::tensor}), "tensor x data");
  EXPECT_THROW((AxisSet{Axis::context, Axis::expert}), InvalidArgument);
  EXPECT_THROW((AxisSet{Axis::data, Axis::expert_data}), InvalidArgument);
  try {
    const AxisSet set{Axis::data, Axis::expert};
    FAIL() << to_string(set);
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("data x expert are no axes of one mesh"));
  }
}

}  // namespace
}  // namespace tesserae::mesh
