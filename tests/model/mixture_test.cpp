#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>

#include <map>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/model/gpt.h"
#include "tesserae/tensor/parallel.h"

// A model with mixtures of experts in the place of its feed-forward layers. What they compute on several ranks is held
// to one process in tests/experts and, with attention and data, in tests/train.
namespace tesserae::model {
namespace {

using ::testing::HasSubstr;

GptConfig mixture() {
  return {.vocabulary = 31,
          .dimension = 16,
          .layers = 2,
          .heads = 2,
          .feed_forward = 12,
          .max_sequence = 16,
          .experts = 4,
          .experts_per_token = 2,
          .shared_experts = 1};
}

at::Tensor some_tokens(uint64_t seed) {
  return at::randint(31, {3, 9}, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kLong));
}

TEST(Mixture, SizesAreThoseOfTheParameters) {
  for (const int64_t shared : {0, 2}) {
    GptConfig config = mixture();
    config.shared_experts = shared;
    Gpt model(config);
    int64_t total = 0, experts = 0;
    for (const auto& item : model->named_parameters()) {
      total += item.value().numel();
      if (item.key().find("blocks.0.feed_forward.experts.") == 0) experts += item.value().numel();
    }
    EXPECT_EQ(sizes(config).total, total);
    EXPECT_EQ(sizes(config).experts, experts);
  }
}

TEST(Mixture, EachBlockRoutesItsTokens) {
  Gpt model(mixture());
  const auto parameters = model->named_parameters();
  EXPECT_TRUE(parameters.contains("blocks.1.feed_forward.router.weight"));
  EXPECT_EQ(parameters["blocks.1.feed_forward.experts.down"].sizes(), (std::vector<int64_t>{4, 16, 12}));
  EXPECT_TRUE(parameters.contains("blocks.1.feed_forward.shared.up.weight"));
  EXPECT_FALSE(parameters.contains("blocks.1.feed_forward.up.weight"));

  const at::Tensor tokens = some_tokens(1), targets = some_tokens(2);
  const double training = model->forward(tokens, targets).item<double>();
  model->eval();
  const double plain = model->forward(tokens, targets).item<double>();
  EXPECT_GT(training, plain + 0.015) << "two layers, each with a balance loss of 0.01 at least";
  EXPECT_EQ(model->forward(tokens).sizes(), (std::vector<int64_t>{3, 9, 31}));
}

TEST(Mixture, RecomputedActivationsGiveTheSameGradients) {
  std::map<std::string, at::Tensor> gradients;
  double loss = 0;
  for (const bool recomputes : {false, true}) {
    Gpt model(mixture());
    model->checkpoint_activations_of_blocks(recomputes);
    const at::Tensor result = model->forward(some_tokens(1), some_tokens(2));
    result.backward();
    const double here = result.item<double>();
    EXPECT_EQ(recomputes ? loss : here, here);
    loss = here;
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      const auto found = gradients.try_emplace(item.key(), item.value().grad()).first;
      EXPECT_TRUE(found->second.equal(item.value().grad())) << item.key();
    }
  }
}

std::string refusal_of(const GptConfig& config) {
  try {
    resolved(config);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "taken";
}

TEST(Mixture, RefusesWhatCanNotBe) {
  GptConfig config = mixture();
  config.experts_per_token = 5;
  EXPECT_THAT(refusal_of(config), HasSubstr("experts_per_token is 5; it must be <= experts, 4"));
  config = mixture();
  config.balance_loss = -1;
  EXPECT_THAT(refusal_of(config), HasSubstr("balance_loss is -1"));
  comm::run_local(2, [](comm::Fabric& fabric) {
    const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
    GptConfig split = mixture();
    split.parallel =
        std::make_shared<tensor::Parallel>(std::make_shared<comm::MeshFabric>(job, mesh::Mesh(2, {.expert = 2})));
    EXPECT_EQ(refusal_of(split), "taken");
    split.experts = 3;
    EXPECT_THAT(refusal_of(split), HasSubstr("3 experts cannot be shared out by an expert-parallel degree of 2"));
    split.experts = 0;
    EXPECT_THAT(refusal_of(split), HasSubstr("experts is 0, but there are 2 expert-parallel ranks"));
  });
}

}  // namespace
}  // namespace tesserae::model
