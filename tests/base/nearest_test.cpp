#include "tesserae/base/nearest.h"

#include <gtest/gtest.h>

namespace tesserae {
namespace {

TEST(Nearest, EditDistance) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("degree", "degree"), 0);
  EXPECT_EQ(edit_distance("degre", "degree"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
}

TEST(Nearest, FindsTheClosestWord) {
  EXPECT_EQ(nearest("hybrid_shard_dgree", {"random_seed", "hybrid_shard_degree"}), "hybrid_shard_degree");
  EXPECT_EQ(nearest("ab", {"ax", "ay"}), "ax") << "the first of several";
  EXPECT_EQ(nearest("anything", {}), "");
}

}  // namespace
}  // namespace tesserae
