#include "tesserae/model/rotary.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cmath>

namespace tesserae::model {
namespace {

TEST(Rotary, TurnsPairsByTheAngleOfTheirPosition) {
  Rotary rotary(6, 100.0);
  const auto x = at::randn({1, 5, 1, 6});
  const auto y = rotary.rotate(x);
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t pair = 0; pair < 3; ++pair) {
      const double angle = static_cast<double>(t) * std::pow(100.0, -2.0 * static_cast<double>(pair) / 6.0);
      const auto in = x[0][t][0], out = y[0][t][0];
      const double a = in[2 * pair].item<double>(), b = in[2 * pair + 1].item<double>();
      EXPECT_NEAR(out[2 * pair].item<double>(), a * std::cos(angle) - b * std::sin(angle), 1e-5);
      EXPECT_NEAR(out[2 * pair + 1].item<double>(), a * std::sin(angle) + b * std::cos(angle), 1e-5);
    }
  }
}

TEST(Rotary, KeepsLengthsAndTheFirstPosition) {
  Rotary rotary(16, 10000.0);
  const auto x = at::randn({2, 9, 3, 16});
  const auto y = rotary.rotate(x);
  EXPECT_TRUE(at::allclose(y.norm(2, -1), x.norm(2, -1), 1e-5));
  EXPECT_TRUE(y.select(1, 0).equal(x.select(1, 0)));
}

TEST(Rotary, DotProductsDependOnDistancesOnly) {
  Rotary rotary(8, 10000.0);
  const auto q = rotary.rotate(at::randn({1, 1, 1, 8}).expand({1, 40, 1, 8}));
  const auto k = rotary.rotate(at::randn({1, 1, 1, 8}).expand({1, 40, 1, 8}));
  auto dot = [&](int64_t i, int64_t j) { return q[0][i][0].dot(k[0][j][0]).item<double>(); };
  EXPECT_NEAR(dot(3, 1), dot(32, 30), 1e-4);
  EXPECT_NEAR(dot(0, 7), dot(31, 38), 1e-4);
  EXPECT_GT(std::abs(dot(3, 1) - dot(3, 2)), 1e-4);
}

TEST(Rotary, LongerSequencesDoNotChangeEarlierPositions) {
  Rotary fresh(8, 10000.0), used(8, 10000.0);
  const auto x = at::randn({1, 37, 2, 8});
  const auto shorter = used.rotate(x.slice(1, 0, 5));
  EXPECT_TRUE(used.rotate(x).equal(fresh.rotate(x)));
  EXPECT_TRUE(shorter.equal(fresh.rotate(x).slice(1, 0, 5)));
}

TEST(Rotary, ATableOfInferenceServesTraining) {
  Rotary rotary(8, 10000.0);
  {
    const c10::InferenceMode inference;
    rotary.rotate(at::randn({1, 4, 1, 8}));
  }
  auto x = at::randn({1, 4, 1, 8}).requires_grad_();
  rotary.rotate(x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(Rotary, ComputesInFp32) {
  Rotary rotary(8, 10000.0);
  const auto x = at::randn({1, 100, 1, 8}).to(at::kBFloat16);
  const auto y = rotary.rotate(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(y.equal(rotary.rotate(x.to(at::kFloat)).to(at::kBFloat16)));
}

}  // namespace
}  // namespace tesserae::model
