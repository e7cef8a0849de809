#include "tesserae/mesh/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

using Shape = std::vector<int64_t>;

constexpr int64_t padding = -1;

int64_t product(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

/// The element of the whole tensor at each place of a part, straight from the definition: index by index, dimension by
/// dimension. Empty if the split cannot be.
std::vector<int64_t> part_by_definition(const Shape& whole, const Split& split) {
  const auto dim = static_cast<size_t>(split.dim);
  const int64_t block = whole[dim] / split.blocks;
  const int64_t rows = (block + split.parts - 1) / split.parts;
  Shape shape = whole;
  shape[dim] = rows * split.blocks;
  std::vector<int64_t> places;
  for (int64_t place = 0; place < product(shape); ++place) {
    Shape index(shape.size());
    int64_t rest = place;
    for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) index[d] = rest % shape[d];
    const int64_t row = index[dim] % rows + split.index * rows;
    index[dim] = index[dim] / rows * block + row;
    int64_t element = 0;
    for (size_t d = 0; d < shape.size(); ++d) element = element * whole[d] + index[d];
    places.push_back(row < block ? element : padding);
  }
  return places;
}

/// The whole tensor's elements as they lie in a stored order.
std::vector<int64_t> stored_by_definition(const Shape& whole, Split split) {
  std::vector<int64_t> order;
  for (split.index = 0; split.index < split.parts; ++split.index) {
    for (const int64_t element : part_by_definition(whole, split)) {
      if (element != padding) order.push_back(element);
    }
  }
  return order;
}

bool possible(const Shape& whole, const Split& split) {
  const int64_t size = whole[static_cast<size_t>(split.dim)];
  if (size % split.blocks != 0) return false;
  return size / split.blocks % split.parts == 0 || (split.dim == 0 && split.blocks == 1);
}

/// All splits of a shape in up to 5 parts and up to 3 blocks, as part 0.
std::vector<Split> splits_of(const Shape& whole) {
  std::vector<Split> splits;
  for (int dim = 0; dim < static_cast<int>(whole.size()); ++dim) {
    for (int parts = 1; parts <= 5; ++parts) {
      for (int blocks = 1; blocks <= 3; ++blocks) {
        if (const Split split{dim, parts, 0, blocks}; possible(whole, split)) splits.push_back(split);
      }
    }
  }
  return splits;
}

const std::vector<Shape> shapes{{1},    {5},    {12},   {0},     {3, 4},    {5, 2},      {6, 1},
                                {1, 6}, {4, 0}, {6, 4}, {2, 12}, {2, 6, 4}, {3, 2, 2, 3}};

std::string describe(const Shape& whole, const Split& split) {
  std::string text = to_string(split) + ", part " + std::to_string(split.index) + " of [";
  for (const int64_t size : whole) text += std::to_string(size) + " ";
  return text + "]";
}

TEST(Split, ShapeElementsAndBeginAreThoseOfTheDefinition) {
  for (const Shape& whole : shapes) {
    for (Split split : splits_of(whole)) {
      int64_t begin = 0;
      for (split.index = 0; split.index < split.parts; ++split.index) {
        SCOPED_TRACE(describe(whole, split));
        const std::vector<int64_t> part = part_by_definition(whole, split);
        const auto real = std::count_if(part.begin(), part.end(), [](int64_t element) { return element != padding; });
        ASSERT_EQ(product(part_shape(whole, split)), static_cast<int64_t>(part.size()));
        ASSERT_EQ(part_elements(whole, split), real);
        ASSERT_EQ(part_begin(whole, split), begin);
        for (int64_t place = real; place < static_cast<int64_t>(part.size()); ++place) {
          ASSERT_EQ(part[static_cast<size_t>(place)], padding) << "padding comes last";
        }
        begin += real;
        ASSERT_EQ(stored_by_definition(whole, stored_order(whole, split).first()), stored_by_definition(whole, split));
      }
      ASSERT_EQ(begin, product(whole));
    }
  }
}

/// What is broken for the runs of one range, or nothing: called some hundred thousand times.
std::string broken_run(const Shape& whole, const Split& split, const std::vector<int64_t>& part, const Range& elements,
                       const Split& stored, const std::vector<int64_t>& order) {
  std::string broken;
  int64_t next = elements.begin;
  Range before{-1, -1};
  for_each_run(whole, split, elements, stored, [&](const Range& from, const Range& to) {
    if (from.begin != next) broken = cat("a gap or a repetition at ", next);
    if (from.empty() || from.size() != to.size()) broken = cat("sizes ", from.size(), " and ", to.size());
    if (to.begin == before.end) broken = cat("a run ends at ", to.begin, " and could go on");
    if (to.begin < 0 || to.end > static_cast<int64_t>(order.size())) broken = "beyond the tensor";
    next = from.end;
    before = to;
    for (int64_t i = 0; broken.empty() && i < from.size(); ++i) {
      if (part[static_cast<size_t>(from.begin + i)] != order[static_cast<size_t>(to.begin + i)]) {
        broken = cat("place ", from.begin + i, " is not at ", to.begin + i);
      }
    }
  });
  const int64_t end = std::min(elements.end, part_elements(whole, split));
  if (broken.empty() && next != std::max(elements.begin, end)) broken = cat("ends at ", next);
  return broken;
}

TEST(Split, RunsFromAnySplitToAnyOtherCoverEachElementOnceAndAreMaximal) {
  int64_t checked = 0;
  for (const Shape& whole : shapes) {
    for (const Split& stored : splits_of(whole)) {
      const std::vector<int64_t> order = stored_by_definition(whole, stored);
      for (Split split : splits_of(whole)) {
        for (split.index = 0; split.index < split.parts; ++split.index) {
          const std::vector<int64_t> part = part_by_definition(whole, split);
          const auto size = static_cast<int64_t>(part.size());
          for (int64_t begin = 0; begin <= size; begin += 1 + size / 12) {
            for (int64_t end = begin; end <= size; end += 1 + size / 12) {
              const std::string broken = broken_run(whole, split, part, {begin, end}, stored, order);
              ASSERT_EQ(broken, "") << describe(whole, split) << " [" << begin << ", " << end << ") to "
                                    << describe(whole, stored);
              ++checked;
            }
          }
          ASSERT_EQ(broken_run(whole, split, part, {0, size}, stored, order), "") << describe(whole, split);
        }
      }
    }
  }
  EXPECT_GT(checked, 100'000);
}

TEST(Split, OrdersThatAreRowMajorHaveOneName) {
  EXPECT_EQ(stored_order({13, 4}, Split{.dim = 0, .parts = 5, .index = 2}), Split{});
  EXPECT_EQ(stored_order({1, 4}, Split{.dim = 1, .parts = 2, .index = 1}), Split{});
  EXPECT_EQ(stored_order({0, 4}, Split{.dim = 1, .parts = 2}), Split{});
  EXPECT_EQ(stored_order({3, 4}, Split{.dim = 1, .parts = 2, .index = 1}), (Split{.dim = 1, .parts = 2}));
  EXPECT_EQ(stored_order({12}, Split{.dim = 0, .parts = 2, .index = 1, .blocks = 3}), (Split{.parts = 2, .blocks = 3}));
}

TEST(Split, TakesAsManyStepsAsThereAreRuns) {
  const Shape whole{1 << 20, 1 << 20};  // 2^40 elements in a million strips
  int runs = 0;
  auto count = [&runs](const Range&, const Range&) { ++runs; };
  const Split columns{.dim = 1, .parts = 4, .index = 2};
  for_each_run(whole, columns, {0, int64_t{1} << 38}, columns, count);
  EXPECT_EQ(runs, 1) << "to the same order";
  const int64_t middle = (int64_t{1} << 37) + 5;
  for_each_run(whole, columns, {middle, middle + 10}, {}, count);
  EXPECT_EQ(runs, 2) << "a run in the middle needs no walk from the beginning";
}

TEST(Split, RefusesWhatCanNotBeCutAndNamesWhatCan) {
  auto refused = [](const Shape& whole, const Split& split) {
    try {
      part_shape(whole, split);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string text = refused({3, 12}, {.dim = 1, .parts = 5});
  EXPECT_NE(text.find("1, 2, 3, 4, 6, 12"), std::string::npos) << text;
  EXPECT_NE(text.find("[3, 12]"), std::string::npos) << text;
  EXPECT_NE(refused({12}, {.dim = 0, .parts = 3, .blocks = 3}), "") << "no padding inside of blocks";
  EXPECT_NE(refused({12}, {.dim = 0, .parts = 2, .blocks = 5}), "");
  EXPECT_NE(refused({12}, {.dim = 1, .parts = 2}), "");
  EXPECT_NE(refused({12}, {.dim = -1, .parts = 2}), "");
  EXPECT_NE(refused({}, {.dim = 0, .parts = 2}), "");
  EXPECT_NE(refused({12}, {.dim = 0, .parts = 2, .index = 2}), "");
  EXPECT_NE(refused({12}, {.dim = 0, .parts = 0}), "");
  EXPECT_NE(refused({12}, {.dim = 0, .parts = 2, .blocks = 0}), "");
  EXPECT_NE(refused({-1}, {}), "");
  EXPECT_EQ(refused({}, {}), "");
  EXPECT_EQ(refused({13}, {.dim = 0, .parts = 5}), "") << "padding";
  EXPECT_THROW(for_each_run({12}, {}, {0, 13}, {}, [](const Range&, const Range&) {}), InvalidArgument);
  EXPECT_THROW(for_each_run({12}, {}, {-1, 3}, {}, [](const Range&, const Range&) {}), InvalidArgument);
  constexpr int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_THROW(part_elements({huge, huge}, Split{.dim = 0, .parts = 2}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::mesh
