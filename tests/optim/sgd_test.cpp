#include "tesserae/optim/sgd.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/linspace.h>
#include <torch/optim/sgd.h>

#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tests/optim/against_torch.h"

namespace tesserae::optim {
namespace {

void expect_like_torch(const SgdOptions& ours) {
  for (const int chunks : {1, 2, 5}) {
    testing::expect_like_torch(
        chunks, 3, [&](const std::shared_ptr<Target>& target) { return std::make_unique<Sgd>(target, ours); },
        [&](std::vector<at::Tensor> matrices, std::vector<at::Tensor> vectors) {
          auto options = torch::optim::SGDOptions(ours.lr).momentum(ours.momentum).nesterov(ours.nesterov);
          auto with_decay = [&](double decay) {
            return std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(options).weight_decay(decay));
          };
          std::vector<torch::optim::OptimizerParamGroup> groups;
          groups.emplace_back(matrices, with_decay(ours.weight_decay));
          groups.emplace_back(vectors, with_decay(0));
          return std::make_unique<torch::optim::SGD>(groups, options);
        });
  }
}

TEST(Sgd, EqualsTorchPlain) {
  expect_like_torch({.lr = 0.1});
}

TEST(Sgd, EqualsTorchWithDecay) {
  expect_like_torch({.lr = 0.1, .weight_decay = 0.2});
}

TEST(Sgd, EqualsTorchWithMomentum) {
  expect_like_torch({.lr = 0.03, .momentum = 0.9, .weight_decay = 0.1});
}

TEST(Sgd, EqualsTorchWithNesterov) {
  expect_like_torch({.lr = 0.03, .momentum = 0.8, .nesterov = true, .weight_decay = 0.1});
}

// torch's fused kernel updates none of the elements that it takes several of at a time.
TEST(Sgd, UpdatesEachElementOfNarrowMasters) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool nesterov : {false, true}) {
      const SgdOptions options{.lr = 0.25, .momentum = 0.5, .nesterov = nesterov, .weight_decay = 0.5};
      const at::Tensor begin = at::linspace(-1, 1, 301).to(dtype);
      const at::Tensor gradient = at::linspace(2, -3, 301).to(dtype);
      std::vector<shard::Shard> narrow(1), wide(1);
      for (const auto& [shards, type] : {std::pair{&narrow, dtype}, std::pair{&wide, at::kFloat}}) {
        shards->front().master = begin.to(type, false, /*copy=*/true);
        shards->front().slices = {{.name = "w", .shape = {7, 43}, .begin = 0, .end = 301}};
      }
      Sgd of_narrow(target_of(narrow), options), of_wide(target_of(wide), options);
      for (int step = 0; step < 3; ++step) {
        narrow[0].grad = gradient.clone();
        wide[0].grad = gradient.to(at::kFloat);
        of_narrow.step({.clip_norm = 1e9});
        of_wide.step({.clip_norm = 1e9});
      }
      const at::Tensor ours = narrow[0].master.to(at::kFloat);
      EXPECT_TRUE(at::allclose(ours, wide[0].master, 0.02, 0.02)) << dtype << (ours - wide[0].master).abs().max();
      EXPECT_GT((ours - begin.to(at::kFloat)).abs().median().item<double>(), 0.2) << dtype;
    }
  }
}

TEST(Sgd, RefusesNesterovWithoutMomentum) {
  std::vector<shard::Shard> shards;
  EXPECT_THROW(Sgd(target_of(shards), {.nesterov = true}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::optim
