#include <ATen/Context.h>
#include <gmock/gmock.h>

#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tesserae/base/checksum.h"
#include "tesserae/checkpoint/crash_point.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/random_state.h"
#include "tesserae/checkpoint/verify.h"
#include "tests/checkpoint/sample.h"
#include "tests/checkpoint/trained.h"
#include "tests/os/scratch.h"
#include "tests/support/ranks.h"

namespace tesserae::checkpoint {
namespace {

using testing::RankArgs;
using testing::Trained;

// Real processes that train with dropout, save after every step and are killed in the middle of it. A second job goes
// on from what is there; in the end everything must be as in a job that nobody disturbed.

constexpr int steps = 6;

/// args: folder, "sync" or "async".
RANK_MAIN(trains) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  Trained trained(*fabric, {.dropout = 0.25}, testing::with_degrees({1, 2, 2}));
  at::manual_seed(11 + static_cast<uint64_t>(fabric->rank()));
  Saver saver(fabric, {.folder = args.at(0), .keep = 2, .asynchronous = args.at(1) == "async"});
  const auto resumed = load_newest(*fabric, args.at(0), [&](const Checkpoint& checkpoint) {
    trained.load(checkpoint);
    EXPECT_TRUE(load_random(checkpoint, fabric->rank(), c10::kCPU));
  });
  if (resumed) publish_model(trained.sharded());
  testing::report("resumed", static_cast<double>(trained.steps()));
  while (trained.steps() < steps) {
    const double loss = trained.step([&] { saver.wait_copied(); });
    testing::report(cat("loss", trained.steps()), loss);
    State state = trained.state();
    for (Piece& piece : random_pieces(fabric->rank(), c10::kCPU)) state.pieces.push_back(std::move(piece));
    saver.save(std::move(state));
  }
  saver.finish();
  std::string bytes;
  for (const Piece& piece : trained.state().pieces) {
    bytes += piece.name + std::string(static_cast<const char*>(piece.data.const_data_ptr()), piece.data.nbytes());
  }
  testing::report("state", static_cast<double>(checksum(bytes) >> 12));  // a double keeps 52 bits
}

class Processes : public os::Scratch {
 protected:
  testing::RankResults train(const std::string& mode, const std::string& crash_at = "") {
    testing::RankJob job;
    job.main = "trains";
    job.args = {folder_ / "checkpoints", mode};
    if (!crash_at.empty()) job.environment = {{"TESSERAE_CRASH_AT", crash_at}};
    return testing::run_ranks(job);
  }
};

TEST_F(Processes, KilledJobsGoOnBitwise) {
  const auto undisturbed = train("sync");
  ASSERT_TRUE(undisturbed.all_succeeded()) << undisturbed.text();
  struct Case {
    std::string mode, crash_at;
    int victim, resumes_from;
  };
  for (const Case& one : {Case{"async", "data-begun@1#3", 1, 2}, Case{"async", "marks-removed@0#4", 0, 3},
                          Case{"sync", "manifest-written@0#2", 0, 1}, Case{"sync", "renamed@0#3", 0, 3},
                          Case{"async", "done@1#1", 1, 0}}) {
    const std::string what = cat(one.mode, " ", one.crash_at);
    std::filesystem::remove_all(folder_ / "checkpoints");
    const auto killed = train(one.mode, one.crash_at);
    ASSERT_EQ(killed[one.victim].exit.signal, SIGKILL) << what << killed.text();
    EXPECT_EQ(killed[1 - one.victim].exit.code, 1) << what << killed.text();

    const auto resumed = train(one.mode);
    ASSERT_TRUE(resumed.all_succeeded()) << what << resumed.text();
    for (int rank = 0; rank < 2; ++rank) {
      // A killed rank 1 may have been the last to write: then rank 0 commits or not, as it comes.
      EXPECT_GE(resumed[rank].value("resumed"), one.resumes_from) << what;
      EXPECT_LE(resumed[rank].value("resumed"), one.resumes_from + 1) << what;
      EXPECT_EQ(resumed[rank].value("state"), undisturbed[rank].value("state")) << what;
      for (int step = static_cast<int>(resumed[rank].value("resumed")) + 1; step <= steps; ++step) {
        EXPECT_EQ(resumed[rank].value(cat("loss", step)), undisturbed[rank].value(cat("loss", step))) << what << step;
      }
    }
    EXPECT_TRUE(testing::strays_in(folder_ / "checkpoints").empty()) << what;
    EXPECT_EQ(list_checkpoints(folder_ / "checkpoints").size(), 2u) << what;
    EXPECT_TRUE(verify(folder_ / "checkpoints" / cat("step-", steps)).faults.empty()) << what;
  }
}

}  // namespace
}  // namespace tesserae::checkpoint
