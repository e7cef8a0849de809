#include "tesserae/mesh/strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(Strategy, PresetsAreTheTableOfTheDesign) {
  EXPECT_EQ(preset("NO_SHARD", 8), (Strategy{{1, 1, 1}, false, false}));
  EXPECT_EQ(preset("ZERO_1", 8), (Strategy{{1, 1, 8}, false, false}));
  EXPECT_EQ(preset("ZERO_2", 8), (Strategy{{1, 8, 8}, false, false}));
  EXPECT_EQ(preset("SHARD_GRAD_OP", 8), (Strategy{{8, 8, 8}, false, true}));
  EXPECT_EQ(preset("FULL_SHARD", 8), (Strategy{{8, 8, 8}, true, true}));
  EXPECT_EQ(preset("HYBRID_SHARD", 8, 2), (Strategy{{2, 2, 2}, true, true}));
  EXPECT_EQ(preset("HYBRID_SHARD_ZERO2", 8, 4), (Strategy{{4, 4, 4}, false, true}));
  EXPECT_EQ(preset("_HYBRID_SHARD_ZERO2", 8, 4), preset("HYBRID_SHARD_ZERO2", 8, 4));
  EXPECT_EQ(preset("ZERO_PP", 8, 2), (Strategy{{2, 8, 8}, true, true}));
}

TEST(Strategy, EveryPresetIsAValidLayoutForEveryDegree) {
  for (int ranks = 1; ranks <= 24; ++ranks) {
    for (int degree = 1; degree <= ranks; ++degree) {
      if (ranks % degree != 0) continue;
      for (const std::string& name : preset_names()) {
        EXPECT_NO_THROW(Layout(ranks, preset(name, ranks, degree).degrees)) << name << " " << degree << " of " << ranks;
      }
    }
  }
}

TEST(Strategy, HybridShardDegreeIsADial) {
  EXPECT_EQ(from_hybrid_shard_degree(1, 8), preset("NO_SHARD", 8));
  EXPECT_EQ(from_hybrid_shard_degree(2, 8), preset("HYBRID_SHARD", 8, 2));
  EXPECT_EQ(from_hybrid_shard_degree(8, 8), preset("FULL_SHARD", 8));
  EXPECT_EQ(from_hybrid_shard_degree(1, 1), preset("NO_SHARD", 1));
}

TEST(Strategy, ErrorsNameWhatWouldBeValid) {
  EXPECT_THAT(error_of([] { preset("FULL_SHARDS", 8); }), HasSubstr("did you mean FULL_SHARD?"));
  EXPECT_THAT(error_of([] { preset("ZERO3", 8); }), HasSubstr("no strategy is called 'ZERO3'"));
  EXPECT_THAT(error_of([] { preset("HYBRID_SHARD", 8, 3); }),
              AllOf(HasSubstr("HYBRID_SHARD=3 does not divide the 8 ranks"), HasSubstr("nearest valid: 2, 4")));
  EXPECT_THAT(error_of([] { preset("HYBRID_SHARD", 8); }), HasSubstr("nearest valid: 1"));
  EXPECT_THAT(error_of([] { from_hybrid_shard_degree(16, 8); }), HasSubstr("nearest valid: 8"));
  EXPECT_THAT(error_of([] { from_hybrid_shard_degree(-1, 8); }), HasSubstr("nearest valid: 1"));
  EXPECT_THAT(error_of([] { from_hybrid_shard_degree(1, 0); }), HasSubstr("0 ranks"));
}

}  // namespace
}  // namespace tesserae::mesh
