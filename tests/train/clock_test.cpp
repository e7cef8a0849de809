#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <deque>
#include <fstream>
#include <string>
#include <vector>

#include "tesserae/os/port.h"
#include "tests/train/train_job.h"

// The wall clock is set by an hour while a job trains, for one rank only, as on one of several hosts. Nothing happens:
// deadlines, signs of life and leases go by the monotonic clock, and what is compared across ranks is no time.

namespace tesserae::train {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr int ranks = 2;
constexpr size_t steps = 48;
constexpr int64_t hour = 3600;
constexpr size_t last_save = 40;

class Clock : public testing::Test {
 protected:
  Clock() : job_("clock") {
    for (int rank = 0; rank < ranks; ++rank) set(rank, 0);
  }

  void set(int rank, int64_t seconds) const {
    if (!os::files().exists(clock(rank))) os::files().write(clock(rank), std::string(sizeof seconds, '\0'));
    // In place: the rank has mapped it.
    std::fstream file(clock(rank), std::ios::in | std::ios::out | std::ios::binary);
    file.write(reinterpret_cast<const char*>(&seconds), sizeof seconds);
  }

  /// The ranks of a job as torchrun starts them, each with a clock of its own.
  std::deque<Program> start(const std::string& run, const std::vector<std::string>& more) const {
    std::vector<std::string> arguments;
    for (const std::string& setting : more) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    const std::string port = std::to_string(os::free_port()), size = std::to_string(ranks);
    std::deque<Program> started;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string number = std::to_string(rank);
      started.push_back(job_.start(run, arguments,
                                   {{"RANK", number},
                                    {"WORLD_SIZE", size},
                                    {"LOCAL_RANK", number},
                                    {"LOCAL_WORLD_SIZE", size},
                                    {"MASTER_ADDR", "127.0.0.1"},
                                    {"MASTER_PORT", port},
                                    {"LD_PRELOAD", STEPPED_CLOCK},
                                    {"STEPPED_CLOCK", clock(rank)}}));
    }
    return started;
  }

  std::string finish(std::deque<Program>& started) const {
    std::string said;
    for (Program& program : started) {
      const auto exit = program.finish(std::chrono::seconds(120));
      EXPECT_TRUE(exit && exit->success()) << (exit ? exit->text() : "still runs") << program.errors;
      said += program.output + program.errors;
    }
    return said;
  }

  std::string clock(int rank) const { return cat(job_.folder(), "/clock-", rank); }

  const TrainJob job_;
};

TEST_F(Clock, IsStepped) {
  const auto with = [this](const std::string& backend) {
    return std::vector<std::string>{cat("train.steps=", steps),
                                    cat("hybrid_shard_degree=", ranks),
                                    "run.backend=" + backend,
                                    "run.deadline_seconds=30",
                                    "checkpoint.every_steps=10",
                                    "checkpoint.memory_every_steps=5",
                                    "preemption.file=" + job_.path("end-early")};
  };
  std::deque<Program> undisturbed = start("alone", with("shm"));
  finish(undisturbed);
  for (const std::string backend : {"shm", "gloo"}) {  // to the same bits
    std::deque<Program> started = start(backend, with(backend));
    // Rank 0 serves the store, and writes what there is of the run.
    size_t step = 3;
    for (const auto& [rank, seconds] :
         std::vector<std::pair<int, int64_t>>{{1, hour}, {1, -hour}, {0, hour}, {0, -hour}, {0, 0}, {1, 0}}) {
      ASSERT_TRUE(started[0].wait_for(cat("step ", step, "/"))) << started[0].errors;
      set(rank, seconds);
      step += 7;
    }
    EXPECT_THAT(finish(started), Not(HasSubstr("warning"))) << "no rank was taken for lost, no save failed";
    job_.expect_same_history(backend, "alone", steps);
    job_.expect_same_state(backend, "alone", last_save);
    EXPECT_EQ(job_.summary(backend)["val_loss"], job_.summary("alone")["val_loss"]);
  }
}

TEST_F(Clock, IsSeenByTheRanks) {
  set(0, hour);
  Program program({"date", "+%s"}, {{"LD_PRELOAD", STEPPED_CLOCK}, {"STEPPED_CLOCK", clock(0)}});
  EXPECT_TRUE(program.finish()->success());
  EXPECT_GE(std::stoll(program.output), ::time(nullptr) + hour - 60);
}

}  // namespace
}  // namespace tesserae::train
