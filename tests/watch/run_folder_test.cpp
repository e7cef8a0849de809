#include "tesserae/watch/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tesserae/base/error.h"
#include "tesserae/os/limits.h"
#include "tests/os/scratch.h"

namespace tesserae::watch {
namespace {

using ::testing::HasSubstr;

class WatchedFolder : public os::Scratch {
 protected:
  WatchedFolder() { os::files().make_directories(folder_ / "monitor"); }

  void write(const char* name, std::string_view text) { os::files().write(folder_ / name, text); }
  void write_now(const std::string& state, double age) {
    write("monitor/now.json", Json{{"state", state}, {"time", os::time_of_day() - age}}.dump());
  }
};

std::string error_of(const os::Path& folder) {
  try {
    RunFolder run(folder);
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

TEST_F(WatchedFolder, MustBeARun) {
  EXPECT_THAT(error_of(folder_ / "nowhere"), HasSubstr("there is no folder"));
  os::files().make_directories(folder_ / "runs/a/monitor");
  os::files().make_directories(folder_ / "runs/b");
  write("runs/b/config.json", "{}");  // of a model
  EXPECT_THAT(error_of(folder_ / "runs/b"), HasSubstr("run.folder"));
  EXPECT_THAT(error_of(folder_ / "runs"), HasSubstr("Below it are runs: " + (folder_ / "runs/a").native()));
  EXPECT_EQ(error_of(folder_ / "runs/a"), "");
  EXPECT_NO_THROW(RunFolder(folder_ / "runs/b", /*begins=*/true));
}

TEST_F(WatchedFolder, NothingIsThereYet) {
  RunFolder run(folder_);
  EXPECT_EQ(run.now(), nullptr);
  EXPECT_FALSE(run.timeline(0, 64));
  EXPECT_EQ(run.metrics(0).text, "");
  EXPECT_EQ(run.metrics(77).next, 0u);
  EXPECT_TRUE(run.last_metrics().is_null());
  const Json told = run.run();
  EXPECT_FALSE(told["live"]);
  EXPECT_FALSE(told["ended"]);
  EXPECT_FALSE(told["died"]);
  EXPECT_TRUE(told["config"].is_null());
}

TEST_F(WatchedFolder, TellsLivingFromDead) {
  RunFolder run(folder_);
  write_now("running", 0.5);
  EXPECT_TRUE(run.life().live);
  write_now("ended", 0);
  EXPECT_TRUE(run.life().ended);
  EXPECT_FALSE(run.life().live);

  write_now("running", 60);
  RunFolder dead(folder_);
  EXPECT_TRUE(dead.life().died);
  EXPECT_NEAR(dead.life().silent_seconds, 60, 20);
  write("summary.json", "{}");
  EXPECT_TRUE(dead.life().ended) << "it has left a summary";
  EXPECT_FALSE(dead.life().died);
}

TEST_F(WatchedFolder, TakesAHostWhoseClockIsBehindForAliveOnceItTellsAgain) {
  RunFolder run(folder_);
  write_now("running", 300);
  EXPECT_TRUE(run.life().died);
  write_now("running", 299);
  EXPECT_TRUE(run.life().live);
}

TEST_F(WatchedFolder, WhatIsCutOffIsWhatItWas) {
  RunFolder run(folder_);
  const std::string whole = R"({"step": 1, "ranks": [{"rank": 0}]})";
  write("monitor/now.json", whole);
  EXPECT_EQ(*run.now(), whole);
  for (size_t size = 0; size < whole.size(); ++size) {
    write("monitor/now.json", whole.substr(0, size));
    ASSERT_TRUE(run.now()) << size;
    EXPECT_EQ(*run.now(), whole) << size;
  }
  write("monitor/now.json", R"({"step": 2})");
  EXPECT_EQ(*run.now(), R"({"step": 2})");
  os::files().remove(folder_ / "monitor/now.json");
  EXPECT_EQ(run.now(), nullptr);
}

TEST_F(WatchedFolder, GivesTheRanksOfATimelineThatAreAskedFor) {
  Json all = {{"step", 5}, {"lanes", {"compute"}}, {"ranks", Json::array()}};
  for (int rank = 0; rank < 200; ++rank) all["ranks"].push_back({{"rank", rank}});
  write("monitor/timeline.json", all.dump());
  RunFolder run(folder_);
  const auto ranks_of = [&run](size_t from, size_t count) { return Json::parse(*run.timeline(from, count)); };
  EXPECT_EQ(ranks_of(0, 64)["ranks"].size(), 64u);
  EXPECT_EQ(ranks_of(0, 64)["total"], 200);
  EXPECT_EQ(ranks_of(190, 64)["ranks"].size(), 10u);
  EXPECT_EQ(ranks_of(190, 64)["ranks"][0]["rank"], 190);
  EXPECT_EQ(ranks_of(5000, 64)["ranks"].size(), 0u);
  EXPECT_EQ(ranks_of(SIZE_MAX, SIZE_MAX)["step"], 5);
  write("monitor/timeline.json", "[1, 2]");
  EXPECT_FALSE(run.timeline(0, 64));
  write("monitor/timeline.json", R"({"ranks": 7})");
  EXPECT_FALSE(run.timeline(0, 64));
}

TEST_F(WatchedFolder, GivesWholeLines) {
  RunFolder run(folder_);
  write("metrics.jsonl", "{\"step\": 1}\n{\"step\": 2}\n{\"st");
  RunFolder::Lines lines = run.metrics(0);
  EXPECT_EQ(lines.text, "{\"step\": 1}\n{\"step\": 2}\n");
  EXPECT_EQ(lines.next, 24u);
  EXPECT_EQ(run.metrics(24).text, "");
  EXPECT_EQ(run.metrics(24).next, 24u);
  write("metrics.jsonl", "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 3}\n");
  EXPECT_EQ(run.metrics(24).text, "{\"step\": 3}\n");
  EXPECT_EQ(run.last_metrics()["step"], 3);
  write("metrics.jsonl", "{\"step\": 1}\n");
  lines = run.metrics(36);
  EXPECT_EQ(lines.from, 0u) << "a shorter file is another one";
  EXPECT_EQ(lines.text, "{\"step\": 1}\n");
}

// As a run leaves it that went back to step 1 and has come as far again before anybody looked.
TEST_F(WatchedFolder, TellsAFileInThePlaceOfAnotherFromOneThatGrew) {
  RunFolder run(folder_);
  const auto line = [](int step, const char* loss) { return cat("{\"step\": ", step, ", \"loss\": ", loss, "}\n"); };
  write("metrics.jsonl", line(1, "4.5") + line(2, "4.0"));
  const RunFolder::Lines first = run.metrics(0);
  write("metrics.jsonl", line(1, "4.5") + line(2, "4.0") + line(3, "3.5"));
  const RunFolder::Lines grown = run.metrics(first.next, first.mark);
  EXPECT_EQ(grown.from, first.next);
  EXPECT_EQ(grown.text, line(3, "3.5"));
  EXPECT_EQ(run.metrics(grown.next, grown.mark).text, "");
  EXPECT_EQ(run.metrics(grown.next, grown.mark).mark, grown.mark);
  const std::string other = line(1, "4.5") + line(2, "4.1") + line(3, "3.6") + line(4, "3.2");
  write("metrics.jsonl", other);
  const RunFolder::Lines anew = run.metrics(grown.next, grown.mark);
  EXPECT_EQ(anew.from, 0u);
  EXPECT_EQ(anew.text, other);
  EXPECT_EQ(run.metrics(anew.next, anew.mark).from, anew.next);
}

TEST_F(WatchedFolder, GivesAMegabyteAtATimeAndSkipsALineThatIsLonger) {
  std::string text;
  while (text.size() < 3 * RunFolder::most_line_bytes) text += "{\"step\": " + std::to_string(text.size()) + "}\n";
  write("metrics.jsonl", text);
  RunFolder run(folder_);
  std::string got;
  for (uint64_t from = 0; from < text.size();) {
    const RunFolder::Lines lines = run.metrics(from);
    EXPECT_LE(lines.text.size(), RunFolder::most_line_bytes);
    ASSERT_GT(lines.next, from);
    got += lines.text;
    from = lines.next;
  }
  EXPECT_EQ(got, text);

  write("monitor/events.jsonl", std::string(5 * RunFolder::most_line_bytes / 2, 'x') + "\n{\"kind\": \"slow\"}\n");
  std::string last;
  for (uint64_t from = 0, size = 1; from < size;) {
    const RunFolder::Lines lines = run.events(from);
    ASSERT_GT(lines.next, from);
    from = lines.next;
    size = lines.size;
    last = lines.text;
  }
  EXPECT_THAT(last, ::testing::EndsWith("\n{\"kind\": \"slow\"}\n"));
}

TEST_F(WatchedFolder, DoesNotFollowLinksOrWaitForPipes) {
  write("outside", R"({"secret": 1})");
  os::files().make_directories(folder_ / "run/monitor");
  std::filesystem::create_symlink(folder_ / "outside", folder_ / "run/monitor/now.json");
  std::filesystem::create_symlink(folder_ / "outside", folder_ / "run/metrics.jsonl");
  ASSERT_EQ(::mkfifo((folder_ / "run/monitor/timeline.json").c_str(), 0600), 0);
  os::files().make_directories(folder_ / "run/config.json");
  RunFolder run(folder_ / "run");
  EXPECT_EQ(run.now(), nullptr);
  EXPECT_EQ(run.metrics(0).size, 0u);
  EXPECT_FALSE(run.timeline(0, 1));
  EXPECT_TRUE(run.run()["config"].is_null());

  os::files().make_directories(folder_ / "other");
  std::filesystem::create_directory_symlink(folder_ / "monitor", folder_ / "other/monitor");
  write("monitor/now.json", "{}");
  RunFolder other(folder_ / "other", /*begins=*/true);
  EXPECT_EQ(other.now(), nullptr);
}

}  // namespace
}  // namespace tesserae::watch
