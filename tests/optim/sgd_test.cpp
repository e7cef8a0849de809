#include "tesserae/optim/sgd.h"

#include <torch/optim/sgd.h>

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

TEST(Sgd, RefusesNesterovWithoutMomentum) {
  std::vector<shard::Shard> shards;
  EXPECT_THROW(Sgd(target_of(shards), {.nesterov = true}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::optim
