#include "tesserae/model/init.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tesserae/model/gpt.h"

namespace tesserae::model {
namespace {

const GptConfig deep{.vocabulary = 64, .dimension = 64, .layers = 8, .heads = 4, .tied = false, .seed = 3};

TEST(Init, MetaAndDirectConstructionGiveTheSameNumbers) {
  GptConfig elsewhere = deep;
  elsewhere.device = at::kMeta;
  Gpt direct(deep), meta(elsewhere);
  const auto fill = initialize(elsewhere);
  const auto expected = direct->named_parameters();
  auto parameters = meta->named_parameters().pairs();
  EXPECT_EQ(parameters.size(), expected.size());
  std::reverse(parameters.begin(), parameters.end());  // the order of filling must not matter
  for (const auto& [name, parameter] : parameters) {
    EXPECT_TRUE(parameter.is_meta()) << name;
    auto filled = at::empty(parameter.sizes());
    fill(name, filled);
    EXPECT_TRUE(filled.equal(expected[name])) << name;
  }
}

TEST(Init, OtherDtypesAndStridesAreRoundedCopies) {
  const auto fill = initialize(deep);
  auto plain = at::empty({33, 20});
  fill("w", plain);
  auto half = at::empty({33, 20}, at::kBFloat16);
  fill("w", half);
  EXPECT_TRUE(half.equal(plain.to(at::kBFloat16)));
  auto transposed = at::empty({20, 33}).t();
  fill("w", transposed);
  EXPECT_TRUE(transposed.equal(plain));
}

TEST(Init, Scheme) {
  GptConfig config = deep;
  config.dimension = 256;
  Gpt model(config);
  for (const auto& parameter : model->named_parameters()) {
    const auto& name = parameter.key();
    const auto value = parameter.value().detach();
    if (name.ends_with("norm.weight")) {
      EXPECT_TRUE(value.eq(1).all().item<bool>()) << name;
      continue;
    }
    const bool residual = name.find("output") != std::string::npos || name.find("down") != std::string::npos;
    const double expected = residual ? 0.02 / 4 : 0.02;  // 1 / sqrt(2 * 8 layers)
    EXPECT_NEAR(value.std().item<double>(), expected, 0.03 * expected) << name;
    EXPECT_NEAR(value.mean().item<double>(), 0, 0.03 * expected) << name;
  }
}

TEST(Init, SeedsDifferByNameAndSeed) {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    for (int i = 0; i < 100; ++i) seeds.insert(seed_of(seed, "blocks." + std::to_string(i) + ".weight"));
  }
  EXPECT_EQ(seeds.size(), 1000u);
  GptConfig other = deep;
  other.seed = 4;
  EXPECT_FALSE(Gpt(deep)->parameters()[0].equal(Gpt(other)->parameters()[0]));
}

}  // namespace
}  // namespace tesserae::model
