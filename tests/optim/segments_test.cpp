#include "tesserae/optim/segments.h"

#include <gtest/gtest.h>

namespace tesserae::optim {
namespace {

shard::Shard with(std::vector<shard::Slice> slices) {
  shard::Shard shard;
  shard.slices = std::move(slices);
  return shard;
}

TEST(Segments, JoinNeighboursAcrossPadding) {
  const auto shard = with({{"a", {3, 3}, 0, 9, 0},
                           {"b", {2, 2}, 12, 16, 0},
                           {"norm", {5}, 16, 21, 0},
                           {"bias", {3}, 24, 27, 0},
                           {"c", {4, 100}, 28, 60, 0}});
  const std::vector<Segment> expected = {{0, 16, true}, {16, 27, false}, {28, 60, true}};
  EXPECT_EQ(segments(shard, decays_if_matrix), expected);
}

TEST(Segments, FollowThePolicy) {
  const auto shard = with({{"a.weight", {3, 3}, 0, 9, 0}, {"embedding.weight", {3, 3}, 12, 21, 0}});
  const auto found = segments(shard, [](const std::string& name, const std::vector<int64_t>&) {
    return name.find("embedding") == std::string::npos;
  });
  const std::vector<Segment> expected = {{0, 9, true}, {12, 21, false}};
  EXPECT_EQ(found, expected);
}

TEST(Segments, EmptyShard) {
  EXPECT_TRUE(segments(with({}), decays_if_matrix).empty());
  EXPECT_TRUE(segments(with({{"a", {0}, 4, 4, 0}}), decays_if_matrix).empty());
}

}  // namespace
}  // namespace tesserae::optim
