#include "tesserae/base/pattern.h"

#include <gtest/gtest.h>

namespace tesserae {
namespace {

TEST(Pattern, AStarIsAnyText) {
  for (const char* pattern : {"blocks.1", "blocks.*", "*", "*1", "b*s.*", "**blocks.1**", "*.*"}) {
    EXPECT_TRUE(matches(pattern, "blocks.1")) << pattern;
  }
  for (const char* pattern : {"", "blocks", "blocks.", "blocks.2", "*2", "b*x", "locks.1", "blocks.1.*"}) {
    EXPECT_FALSE(matches(pattern, "blocks.1")) << pattern;
  }
  EXPECT_TRUE(matches("*ab", "aab"));
  EXPECT_TRUE(matches("a*b*c", "a-b-b-c"));
  EXPECT_FALSE(matches("a*b*c", "a-c-b"));
  EXPECT_TRUE(matches("", ""));
  EXPECT_TRUE(matches("*", ""));
}

}  // namespace
}  // namespace tesserae
