#include "tesserae/offload/tier.h"

#include <gtest/gtest.h>

#include "tesserae/base/error.h"

namespace tesserae::offload {
namespace {

TEST(Tier, HasNames) {
  for (const Tier tier : {Tier::device, Tier::host, Tier::disk}) EXPECT_EQ(tier_from_name(to_string(tier)), tier);
  EXPECT_THROW(tier_from_name("tape"), InvalidArgument);
}

TEST(Tier, SaysWhatIsElsewhere) {
  EXPECT_EQ(to_string(Tiers{}), "");
  EXPECT_EQ(to_string(Tiers{.parameters = Tier::host, .optimizer = Tier::disk}),
            "parameters on host, optimizer on disk");
  EXPECT_TRUE((Tiers{.gradients = Tier::disk}.uses(Tier::disk)));
}

}  // namespace
}  // namespace tesserae::offload
