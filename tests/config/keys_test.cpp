#include "tesserae/config/keys.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "tesserae/os/files.h"
#include "tests/config/documents.h"

namespace tesserae::config {
namespace {

TEST(Keys, SmpKeysComeFirst) {
  std::vector<std::string> first;
  for (size_t i = 0; i < 9; ++i) first.push_back(config_keys()[i].path);
  EXPECT_EQ(first,
            (std::vector<std::string>{"hybrid_shard_degree", "sm_activation_offloading", "activation_loading_horizon",
                                      "fsdp_cache_flush_warnings", "allow_empty_shards", "tensor_parallel_degree",
                                      "context_parallel_degree", "expert_parallel_degree", "random_seed"}));
}

TEST(Keys, EveryKeyIsDescribedOnceAndHasADefaultOrIsRequired) {
  std::set<std::string> seen;
  for (const Key& key : config_keys()) {
    EXPECT_TRUE(seen.insert(key.path).second) << key.path;
    EXPECT_GT(key.description.size(), 10u) << key.path;
    EXPECT_EQ(key.description.back(), '.') << key.path;
    EXPECT_TRUE(key.section || !key.default_value.empty()) << key.path;
  }
}

TEST(Keys, EveryDefaultIsValid) {
  const Json resolved = validate(config_schema(), Json::parse(R"({"data": {"path": "x"}})"));
  EXPECT_NO_THROW(validate(config_schema(), resolved));
}

TEST(Keys, TextKeepsToTheWidth) {
  const std::string text = keys_as_text(60, "train.");
  EXPECT_TRUE(text.starts_with("train.steps = 100\n")) << text;
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    if (text[begin] != ' ') continue;  // a key and its default stay on one line
    EXPECT_LE(end - begin, 60u) << text.substr(begin, end - begin);
  }
  EXPECT_EQ(keys_as_text(80, "nothing"), "");
}

TEST(Keys, EveryExampleIsAConfiguration) {
  int examples = 0;
  for (const std::string& name : os::files().list(TESSERAE_SOURCE_DIR "/examples")) {
    if (!name.ends_with(".json")) continue;
    EXPECT_NO_THROW(load_config(std::string(TESSERAE_SOURCE_DIR "/examples/") + name)) << name;
    ++examples;
  }
  EXPECT_GE(examples, 3);
}

TEST(Keys, ThePageInDocsIsUpToDate) {
  std::istringstream page(os::files().read(TESSERAE_SOURCE_DIR "/docs/configuration.md")), made(keys_as_markdown());
  for (std::string is, should; std::getline(made, should);) {
    std::getline(page, is);
    ASSERT_EQ(is, should) << "run: tesserae config --markdown > docs/configuration.md";
  }
  EXPECT_EQ(page.peek(), EOF);
}

}  // namespace
}  // namespace tesserae::config
