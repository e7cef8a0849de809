#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

namespace tesserae {

/// A promise of time, against several measurements. Their median keeps it; the worst may take ten times as long, since
/// a test shares its machine.
inline void expect_promise(std::vector<double> seconds, double promised) {
  ASSERT_GE(seconds.size(), 5U) << "fewer have no median to speak of";
  std::ranges::sort(seconds);
  const double median = seconds[seconds.size() / 2], worst = seconds.back();
  ::testing::Test::RecordProperty("median_seconds", std::to_string(median));
  ::testing::Test::RecordProperty("worst_seconds", std::to_string(worst));
  std::printf("median %.2f s, worst %.2f s of %zu; promised %.0f s\n", median, worst, seconds.size(), promised);
#ifdef __SANITIZE_THREAD__  // several times as slow as what the promise is made of
  promised *= 5;
#endif
  EXPECT_LE(median, promised);
  EXPECT_LE(worst, 10 * promised);
}

}  // namespace tesserae
