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

TEST(Strategy, ARequestIsByDegreesElseByItsHybridDegreeElseByName) {
  const Degrees degrees{1, 2, 4};
  EXPECT_EQ(resolve({}, 8), preset("FULL_SHARD", 8));
  EXPECT_EQ(resolve({.name = "SHARD_GRAD_OP"}, 8), preset("SHARD_GRAD_OP", 8));
  EXPECT_EQ(resolve({.name = "NO_SHARD", .hybrid_shard_degree = 4}, 8), preset("HYBRID_SHARD", 8, 4));
  EXPECT_EQ(resolve({.name = "FULL_SHARD", .hybrid_shard_degree = 1}, 8), preset("NO_SHARD", 8));
  EXPECT_EQ(resolve({.name = "_HYBRID_SHARD_ZERO2", .hybrid_shard_degree = 2}, 8), preset("HYBRID_SHARD_ZERO2", 8, 2));
  EXPECT_EQ(resolve({.name = "ZERO_PP", .hybrid_shard_degree = 2}, 8), preset("ZERO_PP", 8, 2));
  EXPECT_EQ(resolve({.name = "SHARD_GRAD_OP", .hybrid_shard_degree = 2, .degrees = degrees}, 8),
            (Strategy{degrees, false, true}));
  EXPECT_EQ(resolve({.degrees = degrees}, 8), (Strategy{degrees, true, true}));
  EXPECT_THAT(error_of([] { resolve({.name = "HYBRID_SHARD", .hybrid_shard_degree = 3}, 8); }),
              HasSubstr("nearest valid: 2, 4"));
  EXPECT_THAT(error_of([] { resolve({.degrees = Degrees{3, 3, 3}}, 8); }), HasSubstr("nearest valid: P=2"));
}

TEST(Strategy, WhatWasNeverGatheredIsFreedAtOtherDegrees) {
  const Degrees half{4, 4, 4};
  for (const char* name : {"NO_SHARD", "ZERO_1", "ZERO_2"}) {
    EXPECT_EQ(with_degrees(preset(name, 8), half), (Strategy{half, true, true})) << name;
  }
  EXPECT_EQ(with_degrees(preset("SHARD_GRAD_OP", 8), half), (Strategy{half, false, true}));
  EXPECT_EQ(with_degrees(preset("FULL_SHARD", 8), {1, 1, 1}), (Strategy{{1, 1, 1}, true, true}));
  // At P > 1 somebody asked for parameters that stay.
  EXPECT_EQ(with_degrees({{2, 2, 2}, false, false}, half), (Strategy{half, false, false}));
}

TEST(Strategy, TheClosestPresetIsTheOneThatItCameFrom) {
  for (const char* name : {"NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}) {
    EXPECT_EQ(closest_preset(preset(name, 8, 4), 8), name);
    EXPECT_EQ(takes_degree(name), std::string_view(name).starts_with("HYBRID"));
  }
  EXPECT_EQ(closest_preset(preset("HYBRID_SHARD", 8, 8), 8), "FULL_SHARD");
  EXPECT_FALSE(takes_degree("none"));
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
