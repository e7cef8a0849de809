#include "tesserae/doctor/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"

namespace tesserae::doctor {
namespace {

const Finding fine{"clock", Verdict::good, "synchronised", ""};
const Finding crowded{"threads", Verdict::warning, "8 ranks of 16 threads", "OMP_NUM_THREADS=2"};

TEST(DoctorReport, WhatRanksFindAlikeStandsOnce) {
  const std::vector<RankReport> reports = {
      {0, "a", {fine, crowded}}, {1, "a", {fine, crowded}}, {2, "b", {fine}}, {4, "b", {fine, crowded}}};
  EXPECT_EQ(in_words(reports),
            "good     clock            synchronised\n"
            "warning  threads          8 ranks of 16 threads (ranks 0-1, 4)\n"
            "                          -> OMP_NUM_THREADS=2\n");
}

TEST(DoctorReport, WhatRanksFindOtherwiseStandsTogether) {
  const Finding other{"clock", Verdict::note, "nobody keeps it right", "run NTP"};
  EXPECT_EQ(in_words({{0, "a", {fine, crowded}}, {1, "b", {other, crowded}}}),
            "good     clock            synchronised (rank 0)\n"
            "note     clock            nobody keeps it right (rank 1)\n"
            "                          -> run NTP\n"
            "warning  threads          8 ranks of 16 threads\n"
            "                          -> OMP_NUM_THREADS=2\n");
}

TEST(DoctorReport, TravelsAsJson) {
  const RankReport report{3, "host", {fine, crowded}};
  const RankReport back = report_from(to_json(report).dump());
  EXPECT_EQ(back.rank, 3);
  EXPECT_EQ(back.host, "host");
  ASSERT_EQ(back.findings.size(), 2u);
  EXPECT_EQ(back.findings[1].verdict, Verdict::warning);
  EXPECT_EQ(back.findings[1].advice, crowded.advice);
  EXPECT_THROW(report_from("{"), InvalidArgument);
  EXPECT_THROW(report_from(R"({"rank": 0, "host": "a"})"), InvalidArgument);
  EXPECT_THROW(report_from(R"({"rank": 0, "host": "a", "findings": [{"subject": "a", "verdict": "fine", "fact": "",
                              "advice": ""}]})"),
               InvalidArgument);
}

}  // namespace
}  // namespace tesserae::doctor
