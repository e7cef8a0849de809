#include "tesserae/monitor/board.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::monitor {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// A report that tells of steps `first` to `last`, of 0.1 s each, half of it forward.
Report report_of(int64_t number, int64_t first, int64_t last) {
  Report report{.number = number, .now = {.step = last + 1, .stage = Stage::forward, .unit = 1, .seconds = 0.01}};
  for (int64_t step = first; step <= last; ++step) {
    StepTimes times{.step = step, .total = 0.1};
    times.seconds[static_cast<size_t>(Stage::forward)] = 0.05;
    times.seconds[static_cast<size_t>(Stage::reduce)] = 0.05;
    report.steps.push_back(times);
  }
  report.sent = {1, 2, 3, 4, 5, 6};
  return report;
}

Timeline timeline_of(int64_t step) {
  return {.step = step,
          .seconds = 0.1,
          .spans = {{.lane = 0, .stage = Stage::forward, .unit = 1, .begin = 0, .seconds = 0.05}}};
}

TEST(Board, AStepCountsOnceAllRanksHaveToldOfIt) {
  Board board(2);
  board.take(0, report_of(1, 1, 5));
  board.look();
  EXPECT_EQ(board.step(), 0);
  board.take(1, report_of(1, 1, 3));
  board.look();
  EXPECT_EQ(board.step(), 3);
  EXPECT_DOUBLE_EQ(board.step_seconds(), 0.1);
  board.take(1, report_of(2, 4, 9));
  board.take(0, report_of(2, 6, 8));
  board.look();
  EXPECT_EQ(board.step(), 8);
  const Json now = board.now({"model", "blocks.0"});
  EXPECT_EQ(now["step"], 8);
  EXPECT_EQ(now["seconds"].size(), 2U);
  EXPECT_EQ(now["seconds"][1][1], 0.05);
  EXPECT_EQ(now["usual"][0][1], 0.05);
  EXPECT_THAT(now["waits"], ElementsAre("gather", "reduce", "agree"));
  EXPECT_EQ(now["ranks"][1]["step"], 10);
  EXPECT_EQ(now["ranks"][1]["stage"], "forward");
  EXPECT_EQ(now["ranks"][1]["unit"], "blocks.0");
  EXPECT_THAT(now["traffic"]["bytes"][0], ElementsAre(1, 2, 3, 4, 5, 6));
}

// Quick steps: reports hold the newest few only, so some are told of by one rank and not by another.
TEST(Board, StepsThatARankNeverTellsOfAreLeftOut) {
  Board board(2);
  for (int64_t round = 1; round <= 100; ++round) {
    board.take(0, report_of(round, 100 * round - 31, 100 * round));
    board.take(1, report_of(round, 100 * round - 11, 100 * round + 20));
    board.look();
    EXPECT_EQ(board.step(), 100 * round);
  }
}

TEST(Board, ARunMayGoBack) {
  Board board(2);
  for (int rank : {0, 1}) board.take(rank, report_of(1, 1, 50));
  board.look();
  EXPECT_EQ(board.step(), 50);
  Report slow = report_of(2, 31, 40);
  for (StepTimes& times : slow.steps) times.seconds[static_cast<size_t>(Stage::forward)] = times.total = 0.5;
  board.take(0, report_of(2, 31, 40));
  board.take(1, slow);
  const std::vector<Event> events = board.look();
  EXPECT_EQ(board.step(), 40);
  EXPECT_EQ(board.now({})["seconds"][1][1], 0.5);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].kind, "slow");
  EXPECT_EQ(events[0].rank, 1);
}

TEST(Board, ShowsTheTimelinesOfOneStep) {
  Board board(2);
  EXPECT_TRUE(board.timeline({}).is_null());
  Report first = report_of(1, 1, 4), second = report_of(1, 1, 6);
  first.timeline = timeline_of(4);
  second.timeline = timeline_of(6);
  board.take(0, first);
  board.take(1, second);
  EXPECT_TRUE(board.timeline({}).is_null()) << "not of the same step";
  first.number = 2;
  first.timeline = timeline_of(6);
  board.take(0, first);
  const Json shown = board.timeline({"model", "blocks.0"});
  EXPECT_EQ(shown["step"], 6);
  EXPECT_EQ(shown["ranks"].size(), 2U);
  EXPECT_THAT(shown["ranks"][1]["events"][0], ElementsAre(0, 1, 1, 0, 50000));
}

TEST(Board, SaysWhoHasMostToDo) {
  Board board(4);
  for (int rank = 0; rank < 4; ++rank) {
    Report report = report_of(1, 1, 1);
    report.work = {100, rank == 2 ? 250U : 50U, 0};
    board.take(rank, report);
  }
  const Json load = board.now({})["load"];
  EXPECT_THAT(load["kinds"], ElementsAre("tokens", "expert_tokens", "pairs"));
  EXPECT_THAT(load["amounts"][2], ElementsAre(100, 250, 0));
  EXPECT_THAT(load["most"], ElementsAre(0, 2, nullptr)) << "nobody has told of pairs";
  EXPECT_THAT(load["imbalance"], ElementsAre(1.0, 2.5, nullptr));
  EXPECT_TRUE(Board(2).now({})["load"]["most"][0].is_null()) << "before anybody has told anything";
}

TEST(Board, SaysWhoseLinkIsSlowestInEachHop) {
  Board board(3);
  const auto hop = [](const char* link, double quickest) {
    return comm::LinkUse{.link = link,
                         .lane = "reduce",
                         .verb = "all_reduce",
                         .ranks = 3,
                         .calls = 2,
                         .bytes = 1000,
                         .seconds = 0.25,
                         .quickest = quickest};
  };
  for (int rank = 0; rank < 3; ++rank) {
    Report report = report_of(1, 1, 1);
    report.links = {hop("tcp", rank == 1 ? 1e8 : 1e9)};
    if (rank == 2) report.links.insert(report.links.begin(), {hop("shared memory", 5e9), hop("device", 0)});
    board.take(rank, report);
  }
  const Json links = board.now({})["links"];
  EXPECT_EQ(links["hops"][0], Json({{"link", "tcp"}, {"lane", "reduce"}, {"verb", "all_reduce"}, {"ranks", 3}}));
  EXPECT_EQ(links["hops"][1]["link"], "shared memory");
  EXPECT_THAT(links["bytes"][0], ElementsAre(1000, 0, 0));
  EXPECT_THAT(links["bytes"][2], ElementsAre(1000, 1000, 1000));
  EXPECT_THAT(links["calls"][2], ElementsAre(2, 2, 2));
  EXPECT_THAT(links["seconds"][1], ElementsAre(0.25, 0, 0));
  EXPECT_THAT(links["speed"][1], ElementsAre(100'000'000, 0, 0));
  EXPECT_THAT(links["slowest"], ElementsAre(1, nullptr, nullptr)) << "of one rank alone nothing is said";
  EXPECT_EQ(Board(1).now({})["links"]["hops"].size(), 0U);
}

TEST(Board, SaysThatALinkIsSlowAndWhatTravelsOverIt) {
  Board board(2);
  EXPECT_TRUE(board.now({})["slow_link"].is_null());
  std::vector<Event> events;
  for (int64_t step = 1; step <= 40; ++step) {
    for (int rank = 0; rank < 2; ++rank) {
      Report report = report_of(step, step, step);
      if (step > 30) {
        report.steps[0].seconds[static_cast<size_t>(Stage::reduce)] += 0.08;
        report.steps[0].total += 0.08;
      }
      report.links = {{.link = "shared memory", .verb = "all_gather", .ranks = 2, .bytes = 100, .seconds = 0.01},
                      {.link = "tcp", .verb = "exchange", .ranks = 2, .bytes = 2'000'000, .seconds = 0.1}};
      board.take(rank, report);
    }
    for (Event& event : board.look()) events.push_back(event);
  }
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].kind, "slow_link");
  EXPECT_EQ(events[0].step, 31) << "at once: by more than half a step";
  EXPECT_EQ(events[0].rank, -1);
  EXPECT_EQ(
      events[0].text,
      "steps take 0.080 s longer than any rank works, in reduce, 44 % of a step: exchange of 2 ranks over tcp takes "
      "longest, at 20 MB/s");
  const Json link = board.now({})["slow_link"];
  EXPECT_EQ(link["stage"], "reduce");
  EXPECT_EQ(link["since"], 31);
}

TEST(Board, SaysWhyASlowLinkIsNoLongerTold) {
  const auto told = [](int64_t until, auto&& change) {
    Board board(2);
    std::vector<std::string> texts;
    for (int64_t step = 1; step <= until; ++step) {
      for (int rank = 0; rank < 2; ++rank) {
        Report report = report_of(step, step, step);
        change(step, report.steps[0]);
        board.take(rank, report);
      }
      for (const Event& event : board.look()) texts.push_back(event.text);
    }
    EXPECT_EQ(texts.size(), 2U);
    return texts.back();
  };
  const auto slow = [](StepTimes& times) {
    times.seconds[static_cast<size_t>(Stage::reduce)] += 0.08;
    times.total += 0.08;
  };
  EXPECT_EQ(told(60,
                 [&](int64_t step, StepTimes& times) {
                   if (step > 30 && step < 50) slow(times);
                 }),
            "bytes travel as fast as before again");
  EXPECT_EQ(told(150,
                 [&](int64_t step, StepTimes& times) {
                   if (step > 30) slow(times);
                 }),
            "it has stayed so for 64 steps and counts as usual now");
  EXPECT_EQ(told(60,
                 [&](int64_t step, StepTimes& times) {
                   if (step > 30) slow(times);
                   if (step > 40) times.degrees = {1, 1, 2};
                 }),
            "the degrees have changed, and with them what travels");
}

TEST(Board, ATimelineIsForAStepThatReportsHaveInCommon) {
  Board board(1);
  EXPECT_EQ(board.timeline_every(0.5), 1);
  board.take(0, report_of(1, 1, 1));
  board.look();
  EXPECT_EQ(board.timeline_every(0.5), 16) << "steps of 0.1 s, two reports";
  EXPECT_EQ(board.timeline_every(0.01), 1);
}

TEST(Board, KeptTimelinesAreThereOnceAllHaveSentTheirs) {
  Board board(2);
  Report report = report_of(1, 1, 3);
  report.kept = {timeline_of(2), timeline_of(3)};
  report.kept_of = 2;
  board.take(0, report);
  EXPECT_THAT(board.take_kept(2), IsEmpty());
  report.kept.clear();
  board.take(1, report);
  const auto kept = board.take_kept(2);
  ASSERT_EQ(kept.size(), 2U);
  EXPECT_EQ(kept[0].size(), 2U);
  EXPECT_THAT(kept[1], IsEmpty()) << "it heard too late";
  EXPECT_THAT(board.take_kept(5), IsEmpty());
}

TEST(Board, StacksStayUntilThereAreNewerOnes) {
  Board board(2);
  Report report = report_of(1, 1, 1);
  report.stacks_of = 1;
  report.stacks = "here";
  board.take(1, report);
  board.take(1, report_of(2, 2, 2));
  EXPECT_THAT(board.stacks(1), ElementsAre("", "here"));
  EXPECT_THAT(board.stacks(2), ElementsAre("", ""));
}

// Before all have begun with it, some may be loading.
TEST(Board, AHangInTheFirstStepIsFound) {
  Board board(2, /*rest=*/0.2);
  const auto take = [&board](int rank, int64_t number, Stage stage, int64_t progress) {
    board.take(rank, {.number = number, .now = {.step = 51, .stage = stage, .progress = progress}});
  };
  const auto wait = [] { os::sleep_for(std::chrono::milliseconds(300)); };
  take(0, 1, Stage::gather, 7);
  wait();
  EXPECT_THAT(board.look(), IsEmpty());
  take(1, 1, Stage::between, 0);
  wait();
  EXPECT_THAT(board.look(), IsEmpty());
  take(1, 2, Stage::forward, 1);
  EXPECT_THAT(board.look(), IsEmpty());
  take(1, 3, Stage::forward, 2);
  wait();
  EXPECT_THAT(board.look(), IsEmpty()) << "it gets on";
  wait();
  const std::vector<Event> events = board.look();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].kind, "hang");
  EXPECT_EQ(events[0].step, 51);
  EXPECT_EQ(events[0].text, "nothing has happened in step 51 for 0 s: rank 1 is in forward of step 51; 1 rank waits");
  EXPECT_TRUE(board.hangs());
}

TEST(Board, ATimelineOfManySpansHasTheLongest) {
  constexpr int ranks = 100;
  Board board(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    Report report = report_of(1, 1, 1);
    Timeline& timeline = report.timeline.emplace(Timeline{.step = 1, .seconds = 4, .spans = {}});
    for (size_t i = 0; i < StepTimer::most_spans; ++i) {
      const double seconds = i % 2 == 0 ? 0.0001 : 0.001 + 1e-6 * static_cast<double>(i);
      timeline.spans.push_back({.lane = 0, .stage = Stage::forward, .unit = 1, .begin = 0, .seconds = seconds});
    }
    board.take(rank, std::move(report));
  }
  EXPECT_EQ(board.timeline_step(), 1);
  const Json shown = board.timeline({});
  ASSERT_EQ(shown["ranks"].size(), static_cast<size_t>(ranks));
  const Json& events = shown["ranks"][99]["events"];
  EXPECT_GT(events.size(), 2000U);
  EXPECT_LE(events.size() * ranks, 1U << 18);
  EXPECT_EQ(events.back()[4], 5095) << "the longest";
}

// Quiet moments are no hangs: nobody waits for others, or somebody does something.
TEST(Board, WhoHasEndedIsNotSilent) {
  Board board(2);
  Report report = report_of(1, 1, 1);
  report.ended = true;
  board.take(0, report);
  board.take(1, report);
  EXPECT_THAT(board.look(), IsEmpty());
  os::sleep_for(std::chrono::milliseconds(5200));
  EXPECT_THAT(board.look(), IsEmpty());
  EXPECT_FALSE(board.hangs());
}

}  // namespace
}  // namespace tesserae::monitor
