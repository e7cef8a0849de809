// Tensors that are cut along two axes, against the definition: element by element.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/mesh/split.h"

namespace tesserae::mesh {
namespace {

using Shape = std::vector<int64_t>;
constexpr int64_t no_element = -1;

/// A tensor whose values are the elements of the whole tensor that they stand for.
struct Tensor {
  Shape shape;
  std::vector<int64_t> values;
};

Tensor iota(const Shape& shape) {
  Tensor tensor{shape, {}};
  tensor.values.resize(
      static_cast<size_t>(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>())));
  std::iota(tensor.values.begin(), tensor.values.end(), 0);
  return tensor;
}

/// One cut, straight from the definition of Split: index by index.
Tensor cut(const Tensor& whole, const Split& split) {
  if (split.whole()) return whole;
  const auto dim = static_cast<size_t>(split.dim);
  const int64_t block = whole.shape[dim] / split.blocks;
  const int64_t rows = (block + split.parts - 1) / split.parts;
  Tensor part{whole.shape, {}};
  part.shape[dim] = rows * split.blocks;
  const auto size = static_cast<int64_t>(iota(part.shape).values.size());
  for (int64_t place = 0; place < size; ++place) {
    Shape index(part.shape.size());
    int64_t rest = place;
    for (size_t d = index.size(); d-- > 0; rest /= part.shape[d]) index[d] = rest % part.shape[d];
    const int64_t row = index[dim] % rows + split.index * rows;
    index[dim] = index[dim] / rows * block + row;
    int64_t element = 0;
    for (size_t d = 0; d < index.size(); ++d) element = element * whole.shape[d] + index[d];
    part.values.push_back(row < block ? whole.values[static_cast<size_t>(element)] : no_element);
  }
  return part;
}

Tensor part_by_definition(const Shape& whole, const Splits& splits) {
  return cut(cut(iota(whole), splits.first()), splits.second());
}

/// All parts of a cut, in their order.
std::vector<Splits> parts_of(const Splits& splits) {
  std::vector<Splits> parts;
  Split first = splits.first(), second = splits.second();
  for (first.index = 0; first.index < first.parts; ++first.index) {
    for (second.index = 0; second.index < second.parts; ++second.index) parts.emplace_back(first, second);
  }
  return parts;
}

std::vector<int64_t> stored_by_definition(const Shape& whole, const Splits& splits) {
  std::vector<int64_t> order;
  for (const Splits& part : parts_of(splits)) {
    for (const int64_t element : part_by_definition(whole, part).values) {
      if (element != no_element) order.push_back(element);
    }
  }
  return order;
}

bool possible(const Shape& whole, const Splits& splits) {
  try {
    part_shape(whole, splits);
  } catch (const InvalidArgument&) {
    return false;
  }
  return true;
}

/// Every pair of cuts of a shape, over expert and over tensor ranks, in up to 3 parts and 2 blocks.
std::vector<Splits> pairs_of(const Shape& whole) {
  std::vector<Split> one;
  for (int dim = 0; dim < static_cast<int>(whole.size()); ++dim) {
    for (const int parts : {2, 3}) {
      for (const int blocks : {1, 2}) one.push_back({.dim = dim, .parts = parts, .blocks = blocks});
    }
  }
  std::vector<Splits> pairs;
  for (Split first : one) {
    first.axis = Axis::expert;
    if (possible(whole, first)) pairs.emplace_back(first);
    for (const Split& second : one) {
      if (const Splits pair(first, second); possible(whole, pair)) pairs.push_back(pair);
    }
  }
  pairs.emplace_back();
  return pairs;
}

const std::vector<Shape> cut_shapes{{12}, {5}, {4, 6}, {3, 4}, {1, 6}, {5, 4}, {4, 0}, {4, 3, 2}, {2, 6, 4}};

TEST(Splits, ShapeElementsAndBeginAreThoseOfTheDefinition) {
  int cut_twice = 0;
  for (const Shape& whole : cut_shapes) {
    for (const Splits& splits : pairs_of(whole)) {
      cut_twice += static_cast<int>(!splits.second().whole());
      int64_t begin = 0;
      for (const Splits& part : parts_of(splits)) {
        SCOPED_TRACE(to_string(part));
        const Tensor expected = part_by_definition(whole, part);
        const auto real =
            static_cast<int64_t>(expected.values.size()) - std::ranges::count(expected.values, no_element);
        ASSERT_EQ(part_shape(whole, part), expected.shape);
        ASSERT_EQ(part_elements(whole, part), real);
        ASSERT_EQ(part_begin(whole, part), begin);
        for (size_t i = 0; i < expected.values.size(); ++i) {
          ASSERT_EQ(expected.values[i] == no_element, static_cast<int64_t>(i) >= real) << "padding comes last";
        }
        for (int64_t element = begin; element < begin + real; ++element) {
          ASSERT_EQ(part_at(whole, splits, element), part) << element;
        }
        begin += real;
      }
      ASSERT_EQ(begin, static_cast<int64_t>(iota(whole).values.size()));
      const Splits named = stored_order(whole, splits);
      ASSERT_EQ(stored_by_definition(whole, named), stored_by_definition(whole, splits)) << to_string(splits);
      ASSERT_EQ(stored_order(whole, named), named);
    }
  }
  EXPECT_GT(cut_twice, 150);
}

/// What is broken for the runs of one range, or nothing.
std::string broken_run(const Shape& whole, const Splits& splits, const Tensor& part, const Range& elements,
                       const Splits& stored, const std::vector<int64_t>& order) {
  std::string broken;
  int64_t next = elements.begin;
  Range before{-1, -1};
  for_each_run(whole, splits, elements, stored, [&](const Range& from, const Range& to) {
    if (from.begin != next) broken = cat("a gap or a repetition at ", next);
    if (from.empty() || from.size() != to.size()) broken = cat("sizes ", from.size(), " and ", to.size());
    if (to.begin == before.end) broken = cat("a run ends at ", to.begin, " and could go on");
    if (to.begin < 0 || to.end > static_cast<int64_t>(order.size())) broken = "beyond the tensor";
    next = from.end;
    before = to;
    for (int64_t i = 0; broken.empty() && i < from.size(); ++i) {
      if (part.values[static_cast<size_t>(from.begin + i)] != order[static_cast<size_t>(to.begin + i)]) {
        broken = cat("place ", from.begin + i, " is not at ", to.begin + i);
      }
    }
  });
  const int64_t end = std::min(elements.end, part_elements(whole, splits));
  if (broken.empty() && next != std::max(elements.begin, end)) broken = cat("ends at ", next);
  return broken;
}

TEST(Splits, RunsFromAnyPairToAnyOtherCoverEachElementOnceAndAreMaximal) {
  int64_t checked = 0;
  for (const Shape& whole : cut_shapes) {
    const std::vector<Splits> pairs = pairs_of(whole);
    for (const Splits& stored : pairs) {
      const std::vector<int64_t> order = stored_by_definition(whole, stored);
      for (const Splits& splits : pairs) {
        for (const Splits& split : parts_of(splits)) {
          const Tensor part = part_by_definition(whole, split);
          const auto size = static_cast<int64_t>(part.values.size());
          for (const Range& elements : {Range{0, size}, Range{size / 3, size - size / 4}, Range{size / 2, size / 2}}) {
            ASSERT_EQ(broken_run(whole, split, part, elements, stored, order), "")
                << to_string(split) << " [" << elements.begin << ", " << elements.end << ") to " << to_string(stored);
            ++checked;
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 50'000);
}

TEST(Splits, OfTheSameOrderAreOneRunHoweverLarge) {
  const Shape whole{64, 1 << 16, 1 << 16};
  int runs = 0;
  auto count = [&runs](const Range&, const Range&) { ++runs; };
  const Split experts{.dim = 0, .parts = 8, .index = 3, .axis = Axis::expert};
  const Splits splits(experts, {.dim = 2, .parts = 4, .index = 1});
  for_each_run(whole, splits, {5, int64_t{1} << 32}, splits, count);
  EXPECT_EQ(runs, 1);
  const Splits context(experts, {.dim = 2, .parts = 4, .index = 1, .axis = Axis::context});
  for_each_run(whole, splits, {5, int64_t{1} << 32}, context, count);
  EXPECT_EQ(runs, 2) << "the same places, whatever the axis is called";
  for_each_run(whole, splits, {int64_t{1} << 20, (int64_t{1} << 20) + (1 << 14) + 5}, {}, count);
  EXPECT_EQ(runs, 4) << "a run in the middle needs no walk from the beginning";
}

TEST(Splits, AreNamedByTheirAxes) {
  const Split experts{.dim = 0, .parts = 2, .axis = Axis::expert};
  const Splits splits(experts, {.dim = 1, .parts = 4, .index = 3});
  EXPECT_EQ(to_string(splits), "dimension 0 cut in 2 parts over expert, then dimension 1 cut in 4 parts");
  EXPECT_EQ(splits.along(Axis::tensor).index, 3);
  EXPECT_EQ(splits.along(Axis::expert).parts, 2);
  EXPECT_TRUE(splits.along(Axis::context).whole());
  EXPECT_EQ(Splits(Split{}, experts), Splits(experts)) << "what does not cut does not count";
  EXPECT_FALSE(Splits(experts).whole());
  EXPECT_TRUE(Splits().whole());
  EXPECT_EQ(stored_order({4, 8}, splits), Splits(experts, {.dim = 1, .parts = 4}));
  EXPECT_EQ(stored_order({2, 8}, splits), Splits()) << "parts of one row each lie in row-major order";
  EXPECT_EQ(stored_order({1, 8}, splits), Splits()) << "and so do those of the only one";
}

TEST(Splits, RefusesWhatCannotBeCutTwice) {
  auto refused = [](const Shape& whole, const Splits& splits) {
    try {
      part_shape(whole, splits);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using ::testing::HasSubstr;
  const Split rows{.dim = 0, .parts = 2, .axis = Axis::expert};
  EXPECT_THAT(refused({4, 4}, {rows, {.dim = 1, .parts = 2, .axis = Axis::expert}}), HasSubstr("along an axis once"));
  EXPECT_THAT(refused({5, 4}, {rows, {.dim = 0, .parts = 2}}), HasSubstr("pads dimension 0"));
  EXPECT_THAT(refused({4, 6}, {rows, {.dim = 1, .parts = 4}}), HasSubstr("1, 2, 3, 6"));
  EXPECT_THAT(refused({4, 6}, {rows, {.dim = 1, .parts = 2, .index = 2}}), HasSubstr("there is no part 2"));
  EXPECT_THAT(refused({4, 6}, {rows, {.dim = 2, .parts = 2}}), HasSubstr("no such dimension"));
  EXPECT_EQ(refused({5, 4}, {rows, {.dim = 1, .parts = 2}}), "") << "the padding stays last";
  EXPECT_EQ(refused({4, 4}, {rows, {.dim = 0, .parts = 3}}), "") << "the second cut may pad";
  EXPECT_THROW(part_at({4, 4}, rows, 16), InvalidArgument);
  EXPECT_THROW(part_at({4, 4}, rows, -1), InvalidArgument);
  EXPECT_THROW(for_each_run({4}, rows, {0, 3}, {}, [](const Range&, const Range&) {}), InvalidArgument);
}

TEST(Splits, SayWhoShardsTheState) {
  const Split experts{.dim = 0, .parts = 2, .axis = Axis::expert}, hidden{.dim = 1, .parts = 2};
  EXPECT_EQ(state_axes({}), axes::state);
  EXPECT_EQ(state_axes(hidden), axes::state);
  EXPECT_EQ(state_axes(experts), axes::expert_state);
  EXPECT_EQ(state_axes({experts, hidden}), axes::expert_state);
  EXPECT_EQ(state_axes(Split{.dim = 0, .parts = 1, .axis = Axis::expert}), axes::state) << "where E is 1 they are one";
}

}  // namespace
}  // namespace tesserae::mesh
