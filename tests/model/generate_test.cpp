#include "tesserae/model/generate.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tesserae/base/error.h"

namespace tesserae::model {
namespace {

using ::testing::ElementsAre;

/// Logits that make the token after the last one (modulo 7) likeliest by far; remembers the longest input.
struct Counting {
  int64_t* longest;
  at::Tensor operator()(const at::Tensor& tokens) const {
    *longest = std::max(*longest, tokens.size(1));
    auto logits = at::zeros({1, tokens.size(1), 7});
    for (int64_t t = 0; t < tokens.size(1); ++t) logits[0][t][(tokens[0][t].item<int64_t>() + 1) % 7] = 50.0;
    return logits;
  }
};

TEST(Generate, FollowsTheModelWithinTheWindow) {
  int64_t longest = 0;
  EXPECT_THAT(generate(Counting{&longest}, {3, 4}, {.tokens = 5, .temperature = 0, .window = 4}),
              ElementsAre(5, 6, 0, 1, 2));
  EXPECT_EQ(longest, 4);
  EXPECT_THAT(generate(Counting{&longest}, {4}, {.tokens = 5, .temperature = 1, .stop = 0}), ElementsAre(5, 6, 0));
}

TEST(Generate, EqualSeedsGiveEqualTexts) {
  auto uniform = [](const at::Tensor& tokens) { return at::zeros({1, tokens.size(1), 1000}); };
  auto run = [&](uint64_t seed) { return generate(uniform, {0}, {.tokens = 20, .temperature = 1, .seed = seed}); };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

TEST(Generate, SamplesByProbability) {
  const auto logits = at::tensor({std::log(0.2), std::log(0.5), std::log(0.3)});
  EXPECT_EQ(sample(logits, 1, 0, 0.0), 1);
  EXPECT_EQ(sample(logits, 1, 0, 0.49), 1);
  EXPECT_EQ(sample(logits, 1, 0, 0.51), 2);
  EXPECT_EQ(sample(logits, 1, 0, 0.81), 0);
  EXPECT_EQ(sample(logits, 1, 0, 0.9999999), 0);
  EXPECT_EQ(sample(logits, 1, 2, 0.9999999), 2);  // top 2: 0.625 and 0.375
  EXPECT_EQ(sample(logits, 1, 2, 0.62), 1);
  EXPECT_EQ(sample(logits, 1, 99, 0.81), 0);
  EXPECT_EQ(sample(logits, 0, 0, 0.9), 1);
  EXPECT_EQ(sample(logits, 0.01, 0, 0.99), 1);  // cold: nearly always the likeliest
}

TEST(Generate, RefusesImpossibleOptions) {
  int64_t longest = 0;
  EXPECT_THROW(generate(Counting{&longest}, {}), InvalidArgument);
  EXPECT_THROW(generate(Counting{&longest}, {1}, {.window = 0}), InvalidArgument);
  EXPECT_THROW(generate(Counting{&longest}, {1}, {.temperature = -1}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::model
