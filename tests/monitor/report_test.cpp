#include "tesserae/monitor/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"

namespace tesserae::monitor {
namespace {

Report full_report() {
  Report report{.number = 7, .now = {.step = 12, .stage = Stage::reduce, .unit = 3, .seconds = 0.25}};
  StepTimes times{.step = 11, .total = 0.5, .faults = 17, .degrees = {1, 2, 4}};
  for (size_t stage = 0; stage < stage_count; ++stage) {
    times.seconds[stage] = 0.001 * static_cast<double>(stage);
    times.off_processor[stage] = 0.002;
    times.stopped[stage] = 0.003;
  }
  report.steps = {times, times};
  report.memory.of(Holds::masters) = 4096;
  report.memory.peak = 1e10;
  report.memory.limit = 2e10;
  report.sent = {1, 2, 3, 4, 5, 6};
  report.work = {4096, 0, uint64_t{1} << 60};
  report.links = {{.link = "tcp",
                   .lane = "reduce",
                   .verb = "exchange",
                   .ranks = 4,
                   .calls = 7,
                   .bytes = uint64_t{1} << 40,
                   .seconds = 0.5,
                   .quickest = 1.5e9}};
  report.timeline =
      Timeline{.step = 8,
               .seconds = 0.5,
               .spans = {{.lane = 2, .stage = Stage::gather, .unit = -1, .begin = 0.125, .seconds = 0.0625}}};
  report.kept = {*report.timeline};
  report.kept_of = 8;
  report.now.progress = 99;
  report.generation = 5;
  report.ended = true;
  report.stacks = "a stack";
  report.stacks_of = 2;
  return report;
}

TEST(Report, ComesBackAsItWas) {
  const Report report = full_report(), again = report_from(to_bytes(report));
  EXPECT_EQ(to_bytes(again), to_bytes(report));
  EXPECT_EQ(again.now.stage, Stage::reduce);
  EXPECT_EQ(again.steps[1].step, 11);
  EXPECT_DOUBLE_EQ(again.steps[0].seconds[4], 0.004);
  EXPECT_EQ(again.steps[1].faults, 17U);
  EXPECT_EQ(again.steps[1].degrees, (mesh::Degrees{1, 2, 4}));
  EXPECT_DOUBLE_EQ(again.timeline->spans[0].begin, 0.125);
  EXPECT_EQ(*again.memory.limit, 2e10);
  EXPECT_EQ(again.work, report.work);
  ASSERT_EQ(again.links.size(), 1U);
  EXPECT_TRUE(again.links[0].same_hop(report.links[0]));
  EXPECT_EQ(again.links[0].bytes, uint64_t{1} << 40);
  EXPECT_DOUBLE_EQ(again.links[0].seconds, 0.5);
  EXPECT_EQ(to_bytes(report_from(to_bytes(Report()))), to_bytes(Report()));
}

TEST(Report, WhatIsNoneIsATypedError) {
  const std::string bytes = to_bytes(full_report());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_THROW(report_from(bytes.substr(0, length)), Corruption) << length;
  }
  EXPECT_THROW(report_from("no report"), Corruption);
  EXPECT_THROW(wish_from(bytes), Corruption);
}

TEST(Wish, ComesBackAsItWas) {
  const Wish wish = wish_from(to_bytes(Wish{.generation = 8,
                                            .timeline_every = 4,
                                            .keep_first = 10,
                                            .keep_last = 12,
                                            .stacks = 3,
                                            .waits = true,
                                            .known = 9}));
  EXPECT_EQ(wish.generation, 8);
  EXPECT_EQ(wish.timeline_every, 4);
  EXPECT_EQ(wish.keep_first, 10);
  EXPECT_EQ(wish.keep_last, 12);
  EXPECT_EQ(wish.stacks, 3);
  EXPECT_TRUE(wish.waits);
  EXPECT_EQ(wish.known, 9);
}

}  // namespace
}  // namespace tesserae::monitor
