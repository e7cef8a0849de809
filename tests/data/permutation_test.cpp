#include "tesserae/data/permutation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::data {
namespace {

std::vector<int64_t> all(const Permutation& permutation) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < permutation.size(); ++i) values.push_back(permutation(i));
  return values;
}

TEST(Permutation, ReachesEachNumberOnce) {
  for (const int64_t size : {1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100, 1000, 4096, 4097, 100'000}) {
    const Permutation permutation(size, 7);
    std::vector<int> hits(static_cast<size_t>(size), 0);
    for (const int64_t value : all(permutation)) {
      ASSERT_GE(value, 0);
      ASSERT_LT(value, size);
      ++hits[static_cast<size_t>(value)];
    }
    for (const int count : hits) ASSERT_EQ(count, 1) << size;
  }
}

TEST(Permutation, SeedAndStreamMatter) {
  const auto base = all(Permutation(1000, 1, 0));
  EXPECT_EQ(base, all(Permutation(1000, 1, 0)));
  for (const auto& other : {all(Permutation(1000, 2, 0)), all(Permutation(1000, 1, 1)), all(Permutation(1000, 0, 1))}) {
    int same = 0;
    for (size_t i = 0; i < base.size(); ++i) same += base[i] == other[i];
    EXPECT_LT(same, 12);  // one is expected
  }
}

TEST(Permutation, NeighboursAreScattered) {
  // The mean distance of two random numbers below n is n / 3, and their order rises as often as it falls.
  const int64_t size = 50'000;
  const auto values = all(Permutation(size, 3));
  double distance = 0;
  int64_t rises = 0, fixed = 0;
  for (size_t i = 1; i < values.size(); ++i) {
    distance += static_cast<double>(std::abs(values[i] - values[i - 1]));
    rises += values[i] > values[i - 1];
    fixed += values[i] == static_cast<int64_t>(i);
  }
  EXPECT_NEAR(distance / static_cast<double>(size), static_cast<double>(size) / 3, 500);
  EXPECT_NEAR(static_cast<double>(rises), static_cast<double>(size) / 2, 500);
  EXPECT_LT(fixed, 10);
}

TEST(Permutation, NumbersArePinned) {
  // A change of these would silently reorder the data of runs that are resumed.
  const Permutation small(10, 42, 1), big(int64_t{1} << 40, 42, 1);
  EXPECT_EQ(all(small), (std::vector<int64_t>{7, 2, 6, 4, 8, 0, 3, 5, 1, 9}));
  EXPECT_EQ(big(0), 175428562596);
}

TEST(Permutation, EmptyIsRefused) {
  EXPECT_THROW(Permutation(0, 1), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::data
