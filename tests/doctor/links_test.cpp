#include "tesserae/doctor/links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tesserae::doctor {
namespace {

using ::testing::HasSubstr;

TEST(DoctorLinks, AreMeasuredAmongTheRanksOfAHost) {
  comm::run_local(3, [](comm::Fabric& fabric) {
    const LinkFacts facts = measure_links(fabric, 1);
    EXPECT_EQ(facts.hosts, 1);
    EXPECT_EQ(facts.ranks, 3);
    ASSERT_EQ(facts.links.size(), 1u);
    EXPECT_EQ(facts.links[0].name, "within hosts");
    EXPECT_EQ(facts.links[0].ranks, 3);
    EXPECT_GT(facts.links[0].microseconds, 0);
    EXPECT_GT(facts.links[0].bytes_per_second, 0);
    EXPECT_GE(facts.clocks_apart, 0);
    EXPECT_LT(facts.clocks_apart, 60);  // one clock, read one after the other
  });
}

TEST(DoctorLinks, ClocksFarApartAreAWarning) {
  LinkFacts facts{.hosts = 2, .ranks = 4, .links = {{"between hosts", 2, 90, 1e9}}, .clocks_apart = 0.01};
  EXPECT_EQ(worst_of(examine(facts)), Verdict::good);
  facts.clocks_apart = 12.5;
  const Findings found = examine(facts);
  EXPECT_EQ(worst_of(found), Verdict::warning);
  EXPECT_THAT(found.at(1).fact, HasSubstr("1.00 GB/s into each of 2 ranks together, a barrier in 90.0 us"));
  EXPECT_THAT(found.back().fact, HasSubstr("12.500 s apart"));
}

}  // namespace
}  // namespace tesserae::doctor
