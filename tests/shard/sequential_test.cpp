#include "tesserae/shard/sequential.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

TEST(Sequential, PolicyMakesUnitsAndKeepsNamesAndNumbers) {
  const auto build = [] {
    torch::nn::Sequential chain(torch::nn::Linear(6, 11), torch::nn::Linear(11, 6), torch::nn::Linear(6, 3));
    fill_all(*chain);
    return chain;
  };
  const at::Tensor input = at::arange(24, at::kFloat).view({4, 6}).div(10);
  auto plain = build();
  plain->forward(input).square().sum().backward();
  std::map<std::string, at::Tensor> expected;
  for (const auto& item : plain->named_parameters()) expected[item.key()] = item.value().grad().clone();

  comm::run_local(2, [&](comm::Fabric& fabric) {
    SequentialUnits model(build(), wrap_larger_than(40));
    auto sharded = shard_model(model, share(fabric), fully_sharded(2));
    EXPECT_EQ(sharded.shards().size(), 3U);  // two wrapped linears, and the root with the small one
    model(input).square().sum().backward();
    for (const auto& shard : sharded.shards()) {
      for (const auto& slice : shard.slices) {
        const at::Tensor want = expected.at(slice.name).view({-1}).narrow(0, slice.offset, slice.end - slice.begin);
        EXPECT_TRUE(at::allclose(shard.grad.narrow(0, slice.begin, slice.end - slice.begin), want, 1e-5)) << slice.name;
      }
    }
  });
}

TEST(Sequential, WrapTypesChoosesByType) {
  torch::nn::Sequential chain(torch::nn::Linear(6, 11), torch::nn::Linear(11, 6));
  EXPECT_TRUE(wrap_types<torch::nn::Linear>()(0, *chain[0]));
  EXPECT_FALSE(wrap_types<BlockImpl>()(0, *chain[0]));
}

}  // namespace
}  // namespace tesserae::shard::testing
