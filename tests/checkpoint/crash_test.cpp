#include <gmock/gmock.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <random>
#include <thread>

#include "tesserae/checkpoint/crash_point.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/verify.h"
#include "tests/checkpoint/sample.h"
#include "tests/os/scratch.h"
#include "tests/support/ranks.h"

namespace tesserae::checkpoint {
namespace {

using testing::RankArgs;

// Real processes on a real file system, killed by SIGKILL: at each named point of the writer, and at random moments.
// What they save is the sample of sample.h, so that a checkpoint's bytes follow from its step.

constexpr int ranks = 3;
constexpr int keep = 2;

struct Victim {
  std::string point;
  int rank;
  int64_t step;
};
Victim victim;
int64_t step_at_hand = 0;

void kill_at_point(std::string_view name, int rank) {
  if (name == victim.point && rank == victim.rank && step_at_hand == victim.step) ::raise(SIGKILL);
}

int own_rank() {
  return std::atoi(std::getenv("RANK"));
}

/// One rank of a job that saves steps [first, last], one after the other.
void save_steps(const os::Path& folder, int64_t first, int64_t last, const std::string& job) {
  const int rank = own_rank();
  for (int64_t step = first; step <= last; ++step) {
    step_at_hand = step;
    const auto tensors = testing::sample_tensors(step);
    const SaveJob save = testing::sample_job({.folder = folder,
                                              .step = step,
                                              .ranks = ranks,
                                              .keep = keep,
                                              .attempt = cat(job, "-", step),
                                              .deadline = std::chrono::seconds(60)},
                                             rank);
    write_part(save, testing::sample_sources(tensors, rank, ranks));
    if (rank == 0) commit(save, {{"step", step}});
    // What training ranks learn from each other, these see in the folder.
    const os::Deadline deadline(std::chrono::seconds(60));
    while (rank != 0 && !os::files().exists(folder / cat("step-", step)) && !deadline.passed()) {
      os::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

RANK_MAIN(dies_at_a_point) {
  victim = {args.at(1), std::stoi(args.at(2)), std::stoll(args.at(3))};
  set_crash_hook(kill_at_point);
  save_steps(args.at(0), 1, 100, "first");
}

RANK_MAIN(dies_at_some_moment) {
  const int64_t first = std::stoll(args.at(1));
  std::jthread killer;
  if (own_rank() == std::stoi(args.at(2))) {
    killer = std::jthread([delay = std::stoll(args.at(3))] {
      os::sleep_for(std::chrono::microseconds(delay));
      ::raise(SIGKILL);
    });
  }
  save_steps(args.at(0), first, first + 1000, args.at(4));
}

class Crash : public os::Scratch {
 protected:
  /// Runs a job until its victim has died; the others, who wait for it, are killed with it.
  void run_until_death(const std::string& main, const RankArgs& args, int victim_rank) {
    testing::RankJob job;
    job.main = main;
    job.ranks = ranks;
    job.args = args;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank != victim_rank) job.left_behind.push_back(rank);
    }
    const auto results = testing::run_ranks(job);
    ASSERT_EQ(results[victim_rank].exit.signal, SIGKILL) << results.text();
  }

  /// The newest checkpoint is whole and no older than `at_least`; the next save leaves nothing but checkpoints.
  int64_t expect_recovery(int64_t at_least, const std::string& when) {
    const auto found = list_checkpoints(folder_);
    const int64_t newest = found.empty() ? 0 : found.back().step;
    EXPECT_GE(newest, at_least) << when;
    if (!found.empty()) {
      EXPECT_EQ(testing::difference_from_sample(Checkpoint::open(found.back().path)), "") << when;
      EXPECT_TRUE(verify(found.back().path).faults.empty()) << when;
    }
    const int64_t next = newest + 1;
    testing::save_sample(
        {.folder = folder_, .step = next, .ranks = ranks, .keep = keep, .attempt = cat("after-", next)});
    EXPECT_THAT(testing::strays_in(folder_), ::testing::IsEmpty()) << when;
    EXPECT_LE(list_checkpoints(folder_).size(), static_cast<size_t>(keep)) << when;
    return next;
  }
};

TEST_F(Crash, AtEveryPointOfEveryRank) {
  int deaths = 0;
  for (const std::string& point : crash_point_names()) {
    const auto& names = crash_point_names();
    const bool of_commit = std::ranges::find(names, point) > std::ranges::find(names, std::string("done"));
    for (int rank = 0; rank < (of_commit ? 1 : ranks); ++rank) {
      for (const int64_t step : {1, 3}) {  // the first save, and one that also removes an older checkpoint
        if (step == 1 && point.starts_with("old-")) continue;
        std::filesystem::remove_all(folder_);
        const std::string when = cat(point, " of rank ", rank, " in step ", step);
        run_until_death("dies_at_a_point", {folder_, point, cat(rank), cat(step)}, rank);
        if (HasFatalFailure()) return;
        const bool committed = std::ranges::find(names, point) >= std::ranges::find(names, std::string("renamed"));
        expect_recovery(committed ? step : step - 1, when);
        ++deaths;
      }
    }
  }
  EXPECT_EQ(deaths, 7 * ranks * 2 + 7 * 2 + 2);
}

class RandomCrash : public Crash {
 protected:
  void die(int deaths) {
    std::mt19937_64 random(3);
    int64_t first = 1;
    for (int i = 0; i < deaths; ++i) {
      const int rank = static_cast<int>(random() % ranks);
      const auto delay = random() % 40'000;
      run_until_death("dies_at_some_moment", {folder_, cat(first), cat(rank), cat(delay), cat("job", i)}, rank);
      if (HasFatalFailure()) return;
      first = expect_recovery(first - 1, cat("death ", i, " after ", delay, " us")) + 1;
      if (HasFailure()) return;
    }
  }
};

TEST_F(RandomCrash, TwoHundred) {
  die(200);
}

// `make crash` runs it (label long).
TEST_F(RandomCrash, DISABLED_Thousand) {
  die(1000);
}

}  // namespace
}  // namespace tesserae::checkpoint
