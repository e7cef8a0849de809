#include "tesserae/shard/flat.h"

#include <gtest/gtest.h>

namespace tesserae::shard {
namespace {

Flat make(const std::vector<std::vector<int64_t>>& shapes, int ranks, mesh::Degrees degrees, int rank) {
  std::vector<Slot> slots;
  for (size_t i = 0; i < shapes.size(); ++i) slots.push_back({{"p" + std::to_string(i)}, shapes[i], 0, 0});
  return {"unit", slots, {at::kFloat, at::kFloat, at::kFloat}, true, mesh::Layout(ranks, degrees), rank};
}

const std::vector<std::vector<int64_t>> odd{{7, 13}, {29, 3}, {13}, {1}, {}};

TEST(Flat, SlotsStartOn16BytesOfTheNarrowestDtypeAndDoNotOverlap) {
  const Flat flat = make(odd, 4, {2, 4, 4}, 0);
  int64_t end = 0;
  for (const auto& slot : flat.slots()) {
    EXPECT_EQ(slot.begin % 8, 0);
    EXPECT_GE(slot.begin, end);
    end = slot.end();
  }
  EXPECT_EQ(flat.elements(), end);
  EXPECT_EQ(flat.parameter_elements(), 7 * 13 + 29 * 3 + 13 + 1 + 1);
}

TEST(Flat, GapsAndSlotsCoverTheBufferOnce) {
  const Flat flat = make(odd, 4, {1, 2, 4}, 0);
  std::vector<int> covered(static_cast<size_t>(flat.total()), 0);
  for (const auto& slot : flat.slots()) {
    for (int64_t i = slot.begin; i < slot.end(); ++i) ++covered[static_cast<size_t>(i)];
  }
  for (const auto& gap : flat.gaps()) {
    for (int64_t i = gap.begin; i < gap.end; ++i) ++covered[static_cast<size_t>(i)];
  }
  for (const int count : covered) ASSERT_EQ(count, 1);
}

TEST(Flat, PiecesNestAndChunksAreWholeCacheLines) {
  for (const auto& degrees : mesh::all_degrees(8)) {
    for (int rank = 0; rank < 8; ++rank) {
      const Flat flat = make(odd, 8, degrees, rank);
      EXPECT_EQ(flat.chunk() % 64, 0);
      const auto chunk = flat.chunk_range(), gradient = flat.gradient_range(), parameter = flat.parameter_range();
      EXPECT_LE(gradient.begin, chunk.begin);
      EXPECT_GE(gradient.end, chunk.end);
      EXPECT_LE(parameter.begin, gradient.begin);
      EXPECT_GE(parameter.end, gradient.end);
    }
  }
}

TEST(Flat, SlicesOfAllChunksAreTheParameters) {
  std::vector<int64_t> found(odd.size(), 0);
  for (int rank = 0; rank < 4; ++rank) {
    const Flat flat = make(odd, 4, {4, 4, 4}, rank);
    for (const auto& slice : flat.slices(flat.chunk_range())) {
      const auto index = static_cast<size_t>(std::stoi(slice.name.substr(1)));
      EXPECT_EQ(slice.offset, found[index]);  // chunks of rank 0, 1, ... follow each other
      found[index] += slice.end - slice.begin;
    }
  }
  EXPECT_EQ(found, (std::vector<int64_t>{7 * 13, 29 * 3, 13, 1, 1}));
}

}  // namespace
}  // namespace tesserae::shard
