#include "tesserae/model/config.h"

#include <gtest/gtest.h>

#include <string>

#include "tesserae/base/error.h"
#include "tesserae/model/gpt.h"

namespace tesserae::model {
namespace {

TEST(GptConfig, FillsIn) {
  const auto config = resolved({.dimension = 256, .heads = 8});
  EXPECT_EQ(config.kv_heads, 8);
  EXPECT_EQ(config.feed_forward, 704);  // 682.67 rounded up to a multiple of 32
  EXPECT_EQ(resolved({.feed_forward = 100}).feed_forward, 100);
}

TEST(GptConfig, ErrorsNameTheField) {
  auto message = [](const GptConfig& config) -> std::string {
    try {
      resolved(config);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message({.vocabulary = 1}).find("vocabulary is 1"), std::string::npos);
  EXPECT_NE(message({.layers = 0}).find("layers is 0"), std::string::npos);
  EXPECT_NE(message({.dimension = 100, .heads = 3}).find("dimension 100 / heads 3"), std::string::npos);
  EXPECT_NE(message({.dimension = 12, .heads = 4}).find("even"), std::string::npos);
  EXPECT_NE(message({.heads = 4, .kv_heads = 3}).find("kv_heads 3"), std::string::npos);
  EXPECT_NE(message({.dropout = 1.0}).find("dropout"), std::string::npos);
  EXPECT_NE(message({.norm_epsilon = 0}).find("norm_epsilon"), std::string::npos);
  EXPECT_EQ(message({}), "");
}

TEST(GptConfig, SizesAreThoseOfTheModel) {
  for (const bool tied : {false, true}) {
    const GptConfig config{
        .vocabulary = 31, .dimension = 24, .layers = 3, .heads = 6, .kv_heads = 2, .tied = tied, .device = at::kMeta};
    const Gpt model(config);
    int64_t total = 0, block = 0;
    for (const auto& parameter : model->named_parameters()) {
      total += parameter.value().numel();
      if (parameter.key().starts_with("blocks.1.")) block += parameter.value().numel();
    }
    EXPECT_EQ(sizes(config).total, total);
    EXPECT_EQ(sizes(config).block, block);
    EXPECT_EQ(sizes(config).head, tied ? 0 : 31 * 24);
    EXPECT_EQ(sizes(config).root, total - 3 * block - sizes(config).head);
  }
}

TEST(GptConfig, SizesOfAModelThatFitsNowhere) {
  const GptConfig config{.vocabulary = 128256,
                         .dimension = 16384,
                         .layers = 126,
                         .heads = 128,
                         .kv_heads = 8,
                         .feed_forward = 53248,
                         .tied = false};
  EXPECT_EQ(sizes(config).total, 405853388800);  // Llama 3.1 405B, as published
}

}  // namespace
}  // namespace tesserae::model
