#include "tesserae/train/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>

#include "tesserae/os/faulty_files.h"
#include "tesserae/train/progress.h"
#include "tesserae/train/run_folder.h"

namespace tesserae::train {
namespace {

class RunFolder : public testing::Test {
 protected:
  RunFolder() { os::files().make_directories(folder_); }
  ~RunFolder() override { os::files().remove_all(folder_); }
  const std::string folder_ = testing::TempDir() + "/tesserae-metrics-" + std::to_string(::getpid());
};

StepRecord record(int64_t step, double loss, double step_ms) {
  StepRecord result;
  result.step = step;
  result.loss = loss;
  result.lr = 1e-3;
  result.grad_norm = 0.5;
  result.tokens_per_second = 1000;
  result.step_ms = step_ms;
  result.comm_ms = step_ms / 4;
  result.ranks = 4;
  result.degrees = {1, 2, 4};
  result.memory_bytes = 7e6;
  result.state_bytes = 3e6;
  return result;
}

TEST_F(RunFolder, MetricsAreOneJsonLineAStepAndThereAtOnce) {
  Metrics metrics(folder_ + "/metrics.jsonl");
  metrics.add(record(1, 5.5, 100));
  EXPECT_EQ(
      os::files().read(folder_ + "/metrics.jsonl"),
      R"({"step":1,"loss":5.5,"lr":0.001,"grad_norm":0.5,"tokens_per_second":1000.0,"step_ms":100.0,"comm_ms":25.0,"ranks":4,"degrees":[1,2,4],"memory_bytes":7000000,"state_bytes":3000000})"
      "\n");
  StepRecord second = record(2, 5.0, 100);
  second.val_loss = 5.25;
  second.skipped = true;
  second.grad_norm = INFINITY;
  const config::Json line = config::Json::parse(to_line(second));
  EXPECT_EQ(line["val_loss"], 5.25);
  EXPECT_EQ(line["skipped"], true);
  EXPECT_TRUE(line["grad_norm"].is_null()) << "JSON has no infinity";
}

TEST_F(RunFolder, FiguresLeaveOutTheFirstSteps) {
  Metrics metrics(folder_ + "/metrics.jsonl");
  for (int64_t step = 1; step <= 23; ++step) metrics.add(record(step, 24.0 - step, step <= 3 ? 1000 : 100 + step));
  const RunFigures figures = metrics.figures();
  EXPECT_EQ(figures.steps, 23);
  EXPECT_DOUBLE_EQ(figures.last_loss, 1);
  EXPECT_DOUBLE_EQ(figures.final_loss, 5.5) << "the mean of the last ten";
  EXPECT_DOUBLE_EQ(figures.step_ms_median, 113.5) << "of steps 4 to 23";
  EXPECT_DOUBLE_EQ(figures.comm_share, 0.25);
  EXPECT_NEAR(figures.tokens_per_second, 1000, 1e-9);
  EXPECT_FALSE(figures.val_loss.has_value());
}

TEST_F(RunFolder, KeepsTheLastAndTheBestValidationLoss) {
  Metrics metrics(folder_ + "/metrics.jsonl");
  for (const double loss : {3.0, 2.0, 2.5}) {
    StepRecord step = record(1, 1, 1);
    step.val_loss = loss;
    metrics.add(step);
  }
  EXPECT_EQ(metrics.figures().val_loss, 2.5);
  EXPECT_EQ(metrics.figures().best_val_loss, 2.0);
}

TEST_F(RunFolder, AContinuedFileHasEachStepOnce) {
  const std::string path = folder_ + "/metrics.jsonl";
  {
    Metrics metrics(path);
    for (int64_t step = 1; step <= 12; ++step) metrics.add(record(step, 20.0 - step, 100));
  }
  // Killed in the middle of a line, after step 12 came a second time.
  os::files().append(path)->write(to_line(record(12, 1, 1)) + "\n{\"step\":13,\"lo");
  const std::string before = os::files().read(path);
  const std::vector<std::string> kept = lines_until(path, 10);
  ASSERT_EQ(kept.size(), 10u);
  EXPECT_EQ(lines_until(path, 99).size(), 12u);
  EXPECT_TRUE(lines_until(folder_ + "/missing", 10).empty());

  Metrics metrics(path, kept);
  EXPECT_TRUE(before.starts_with(os::files().read(path))) << "lines stay as they were";
  metrics.add(record(11, 5, 100));
  EXPECT_EQ(lines_until(path, 99).size(), 11u);
  EXPECT_EQ(metrics.figures().steps, 11);
  EXPECT_DOUBLE_EQ(metrics.figures().final_loss, (18 + 17 + 16 + 15 + 14 + 13 + 12 + 11 + 10 + 5) / 10.0)
      << "the figures count the steps before";
  EXPECT_EQ(os::files().list(folder_), std::vector<std::string>{"metrics.jsonl"});
}

TEST_F(RunFolder, LinesThatADiskRefusesComeLater) {
  os::FaultyFiles faulty(os::files());
  const os::ScopedFiles scope(faulty);
  const std::string path = folder_ + "/metrics.jsonl";
  Metrics metrics(path);
  metrics.add(record(1, 5, 100));
  faulty.fail_at(1, {.error = ENOSPC, .written = 0.4, .lasting = true});
  EXPECT_THROW(metrics.add(record(2, 4, 100)), IoError);
  EXPECT_THROW(metrics.add(record(3, 3, 100)), IoError);
  faulty.fail_at(0);
  metrics.add(record(4, 2, 100));
  metrics.add(record(5, 1, 100));
  EXPECT_EQ(metrics.figures().steps, 5);
  std::vector<int64_t> steps;
  for (const std::string& line : lines_until(path, 99)) steps.push_back(from_line(line)->step);
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3, 4, 5}));
}

TEST(MetricsLine, CanBeReadBack) {
  StepRecord step = record(5, 2.25, 100);
  step.skipped = true;
  step.val_loss = 3.5;
  step.grad_norm = NAN;
  const auto back = from_line(to_line(step));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->step, 5);
  EXPECT_EQ(back->loss, 2.25);
  EXPECT_EQ(back->comm_ms, 25);
  EXPECT_TRUE(back->skipped);
  EXPECT_EQ(back->val_loss, 3.5);
  EXPECT_TRUE(std::isnan(back->grad_norm));
  for (const char* wrong : {"", "{", "[1]", "{\"loss\":1}", "{\"step\":\"5\"}"})
    EXPECT_FALSE(from_line(wrong)) << wrong;
}

TEST_F(RunFolder, NoRunOverwritesAnother) {
  const std::string wanted = folder_ + "/runs/a";
  EXPECT_EQ(make_run_folder(wanted), wanted);
  EXPECT_EQ(make_run_folder(wanted + "/"), wanted) << "an empty folder may be used";
  os::files().write(wanted + "/summary.json", "{}");
  EXPECT_EQ(make_run_folder(wanted), wanted + "-2");
  os::files().write(wanted + "-2/metrics.jsonl", "");
  EXPECT_EQ(make_run_folder(wanted), wanted + "-3");
  EXPECT_EQ(os::files().read(wanted + "/summary.json"), "{}");
}

TEST(ProgressLine, SaysWhatAPersonWants) {
  StepRecord step = record(120, 2.4123, 200);
  step.tokens_per_second = 18432;
  EXPECT_EQ(progress_line(step, 400, uint64_t{1288490188}, 92),
            "step 120/400  loss 2.412  18.4k tok/s  comm 25%  1.2 GB  1:32 left");
  step.val_loss = 2.5;
  EXPECT_EQ(progress_line(step, 400, uint64_t{300} << 20, -1),
            "step 120/400  loss 2.412  18.4k tok/s  comm 25%  300 MB  val 2.500");
}

TEST(ProgressLine, NumbersAreShort) {
  EXPECT_EQ(short_number(950), "950");
  EXPECT_EQ(short_number(2.3e6), "2.3M");
  EXPECT_EQ(short_time(59.6), "1:00");
  EXPECT_EQ(short_time(7384), "2:03:04");
}

}  // namespace
}  // namespace tesserae::train
