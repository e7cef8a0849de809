#include "tesserae/optim/clip.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tesserae/base/error.h"
#include "tesserae/optim/sgd.h"
#include "tests/optim/cut_model.h"
#include "tests/optim/joined_target.h"

namespace tesserae::optim {
namespace {

using testing::CutModel;
using testing::JoinedTarget;

/// The targets of all ranks of `model`, with the sum that an all-reduce would give: what the other ranks hold is known
/// here.
std::shared_ptr<JoinedTarget> joined_target(CutModel& model, size_t rank) {
  auto target = std::make_shared<JoinedTarget>(model.rank(rank));
  target->sum = [&model, rank](double mine) {
    double sum = mine;
    for (size_t other = 0; other < model.ranks(); ++other) {
      if (other != rank) sum += std::pow(global_norm(*target_of(model.rank(other))), 2);
    }
    return sum;
  };
  return target;
}

TEST(Clip, NormEqualsTheUnshardedNorm) {
  const auto w = at::randn({300, 117}).mul_(3), b = at::randn({513});
  const double expected =
      std::sqrt(w.to(at::kDouble).square().sum().item<double>() + b.to(at::kDouble).square().sum().item<double>());
  for (const int chunks : {1, 2, 3, 7}) {
    for (const size_t parameters_per_unit : {1, 2}) {
      CutModel model({{"w", at::ones({300, 117})}, {"b", at::ones({513})}}, chunks, parameters_per_unit);
      model.set_gradients({w, b});
      for (size_t rank = 0; rank < model.ranks(); ++rank) {
        EXPECT_NEAR(global_norm(*joined_target(model, rank)), expected, 1e-6 * expected) << chunks;
      }
    }
  }
}

TEST(Clip, OtherNormsEqualTheUnshardedNorm) {
  const auto w = at::randn({300, 117});
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double p : {1.0, 3.0, infinity}) {
    CutModel model({{"w", at::ones({300, 117})}}, 3, 1);
    model.set_gradients({w});
    const auto target = joined_target(model, 0);
    std::vector<double> others;
    for (const size_t rank : {1, 2}) others.push_back(global_norm(*target_of(model.rank(rank)), p));
    target->sum = [&](double mine) { return mine + std::pow(others[0], p) + std::pow(others[1], p); };
    target->max = [&](double mine) { return std::max({mine, others[0], others[1]}); };
    const double expected = at::linalg_vector_norm(w.to(at::kDouble), p).item<double>();
    EXPECT_NEAR(global_norm(*target, p), expected, 1e-6 * expected) << p;
  }
  std::vector<shard::Shard> shards(1);
  EXPECT_THROW(global_norm(*target_of(shards), 0.0), InvalidArgument);
}

TEST(Clip, ChunksWithReplicasCountOnce) {
  CutModel model({{"w", at::ones({30, 3})}}, 1, 1);
  model.set_gradients({at::ones({30, 3})});
  for (auto& shard : model.rank(0)) shard.replicas = 4;
  JoinedTarget target(model.rank(0));
  target.sum = [](double mine) { return 4 * mine; };
  EXPECT_NEAR(global_norm(target), std::sqrt(90.0), 1e-5);
}

TEST(Clip, NormOfALongGradientKeepsItsDigits) {
  // A sum of 2^25 ones in fp32 stops at 2^24.
  std::vector<shard::Shard> shards(1);
  shards[0].grad = at::ones({1 << 25});
  EXPECT_NEAR(global_norm(*target_of(shards)), std::sqrt(std::pow(2.0, 25)), 1e-2);
}

TEST(Clip, ScalesToTheMaximum) {
  CutModel model({{"w", at::ones({30, 3})}}, 2, 1);
  model.set_gradients({at::ones({30, 3})});
  const double norm = std::sqrt(90.0);
  const std::vector<std::shared_ptr<JoinedTarget>> targets = {joined_target(model, 0), joined_target(model, 1)};
  EXPECT_NEAR(global_norm(*targets[0]), norm, 1e-5);
  EXPECT_NEAR(clip_gradients(*targets[0], 100.0), norm, 1e-5);
  EXPECT_EQ(model.rank(0)[0].grad[0].item<float>(), 1.0f);
  EXPECT_NEAR(clip_gradients(*targets[0], 3.0), norm, 1e-5);
  EXPECT_NEAR(model.rank(0)[0].grad[0].item<float>(), 3.0 / norm, 1e-6);
}

TEST(Clip, WithoutGradientsTheNormIsZero) {
  std::vector<shard::Shard> shards(2);
  shards[0].master = at::ones({4});
  EXPECT_EQ(clip_gradients(*target_of(shards), 1.0), 0.0);
}

TEST(Clip, FrozenShardsDoNotCount) {
  std::vector<shard::Shard> shards(2);
  shards[0].master = at::full({4}, 100.0);
  shards[1].grad = at::full({4}, 2.0);
  EXPECT_NEAR(global_norm(*target_of(shards)), 4.0, 1e-6);
}

TEST(Clip, NonFiniteGradientsAreLeftAlone) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<shard::Shard> shards(1);
    shards[0].grad = at::ones({5000});
    shards[0].grad[4999] = bad;
    EXPECT_FALSE(std::isfinite(clip_gradients(*target_of(shards), 1.0)));
    EXPECT_EQ(shards[0].grad[0].item<float>(), 1.0f);
  }
}

TEST(Clip, StepClipsLikeClipGradients) {
  auto run = [](bool fused) {
    CutModel model({{"w", at::ones({8, 8})}}, 1, 1);
    model.set_gradients({at::full({8, 8}, 3.0)});
    const auto target = target_of(model.rank(0));
    Sgd sgd(target, {.lr = 1.0});
    if (!fused) clip_gradients(*target, 0.5);
    const auto result = sgd.step({.clip_norm = fused ? 0.5 : 0.0});
    EXPECT_NEAR(result.norm, fused ? 24.0 : 0.5, 1e-5);
    return model.gather()[0];
  };
  const auto fused = run(true);
  EXPECT_LT(fused.sub(run(false)).abs().max().item<double>(), 1e-7);
  EXPECT_NEAR(fused[0][0].item<double>(), 1.0 - 0.5 / 8, 1e-6);
}

TEST(Clip, StepWithNonFiniteNormChangesNothing) {
  CutModel model({{"w", at::ones({4})}}, 1, 1);
  model.set_gradients({at::full({4}, std::numeric_limits<float>::quiet_NaN())});
  int published = 0;
  Sgd sgd(target_of(model.rank(0), [&](int) { ++published; }), {.lr = 1.0, .momentum = 0.9});
  EXPECT_TRUE(sgd.step().skipped);
  EXPECT_EQ(published, 0);
  EXPECT_TRUE(model.gather()[0].equal(at::ones({4})));
  EXPECT_FALSE(sgd.step({.measure_norm = false}).skipped);  // unmeasured: the update goes ahead
  EXPECT_TRUE(model.gather()[0].isnan().all().item<bool>());
}

}  // namespace
}  // namespace tesserae::optim
