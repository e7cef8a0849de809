#include "tesserae/shard/initial_values.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

TEST(InitialValues, MetaParametersNeedThem) {
  NetOptions options;
  options.meta = true;
  Net net(options);
  EXPECT_THAT(error_of([&] { shard_model(net, alone()); }), ::testing::HasSubstr("Options::initialize"));
}

TEST(InitialValues, HaveTheShapeOfTheParameter) {
  NetOptions shape;
  shape.meta = true;
  const std::vector<at::Tensor> wrong = {{}, at::zeros({2}), at::empty({2}, at::kMeta)};
  for (const at::Tensor& values : wrong) {
    Net net(shape);
    Options options;
    options.initialize = [&](const std::string&, at::Tensor& parameter) { parameter = values; };
    EXPECT_THAT(error_of([&] { shard_model(net, alone(), options); }),
                ::testing::ContainsRegex("Options::initialize left .* for parameter [a-z0-9.]+ of shape \\["));
  }
  Net net(shape);
  Options options;
  options.initialize = [](const std::string&, at::Tensor& parameter) {
    parameter = at::ones(parameter.sizes(), at::kDouble);
  };
  auto sharded = shard_model(net, alone(), options);
  sharded.visit_parameters(
      [](const std::string& name, const at::Tensor& values) { EXPECT_TRUE(values.eq(1).all().item<bool>()) << name; });
}

TEST(InitialValues, SyncModuleStatesTakesRankZerosValues) {
  comm::run_local(4, [&](comm::Fabric& fabric) {
    Net net{NetOptions{}};
    fill_all(*net);
    const at::Tensor wanted = net->embedding.detach().clone();
    if (fabric.rank() != 0) {
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(fabric.rank());
    }
    Options options = fully_sharded(4);
    options.sync_module_states = true;
    auto sharded = shard_model(net, share(fabric), options);
    sharded.visit_parameters([&](const std::string& name, const at::Tensor& value) {
      if (name == "embedding") {
        EXPECT_TRUE(at::equal(value, wanted));
      }
    });
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
