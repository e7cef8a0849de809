#include "tesserae/context/tiles.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/context/patterns.h"

namespace tesserae::context {
namespace {

/// How often each pair is in a tile, [length, length].
at::Tensor counted(const std::vector<Tile>& list, int64_t length) {
  at::Tensor counts = at::zeros({length, length}, at::TensorOptions().dtype(at::kInt));
  for (const Tile& tile : list) {
    EXPECT_FALSE(tile.queries.empty());
    EXPECT_FALSE(tile.keys.empty());
    if (tile.shape != Shape::full) {
      EXPECT_EQ(tile.queries.size(), tile.keys.size());
    }
    int64_t pairs = 0;
    for (int64_t q = 0; q < tile.queries.size(); ++q) {
      const int64_t from = tile.shape == Shape::from_self_on ? q : 0;
      const int64_t to = tile.shape == Shape::up_to_self ? q + 1 : tile.keys.size();
      counts[tile.queries.begin + q].slice(0, tile.keys.begin + from, tile.keys.begin + to) += 1;
      pairs += to - from;
    }
    EXPECT_EQ(tile.pairs(), pairs);
  }
  return counts;
}

TEST(Tiles, HaveEachPairOnce) {
  constexpr int64_t length = 17;
  for (const Pattern& pattern : testing::patterns(length)) {
    const at::Tensor mask = testing::mask_of(pattern);
    for (const Span& queries : {Span{0, 17}, Span{0, 5}, Span{4, 12}, Span{16, 17}, Span{9, 9}}) {
      for (const Span& keys : {Span{0, 17}, Span{0, 5}, Span{4, 12}, Span{7, 9}, Span{16, 17}, Span{3, 3}}) {
        at::Tensor expected = at::zeros({length, length}, at::TensorOptions().dtype(at::kInt));
        const auto part = [&](const at::Tensor& x) {
          return x.slice(0, queries.begin, queries.end).slice(1, keys.begin, keys.end);
        };
        part(expected).copy_(part(mask));
        for (const int64_t triangle : {0, 1, 3}) {
          EXPECT_TRUE(counted(tiles(pattern, queries, keys, triangle), length).equal(expected))
              << triangle << ": " << to_string(pattern) << ", queries " << queries.begin << " to " << queries.end
              << ", keys " << keys.begin << " to " << keys.end;
        }
      }
    }
  }
}

TEST(Tiles, ACausalSequenceIsATriangleAndWhatCameBefore) {
  EXPECT_THAT(
      tiles(Pattern(100), {40, 60}, {0, 100}),
      ::testing::ElementsAre(Tile{{40, 60}, {0, 40}, Shape::full}, Tile{{40, 60}, {40, 60}, Shape::up_to_self}));
}

}  // namespace
}  // namespace tesserae::context
