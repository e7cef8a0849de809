#include <gtest/gtest.h>

#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/checkpoint/verify.h"
#include "tesserae/checkpoint/weights.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/trained.h"
#include "tests/experts/net.h"

// The training state of a mixture of experts, saved at any number of expert-parallel ranks and loaded at any other.
namespace tesserae::testing {
namespace {

struct SavedJob {
  mesh::AxisDegrees axes;
  mesh::Degrees degrees;
  int ranks;  ///< in all
  std::string name() const {
    return cat("T", axes.tensor, "-E", axes.expert, "-of-", ranks, "-", mesh::to_string(degrees));
  }
};

const std::vector<SavedJob> saved_jobs{{{}, {1, 1, 1}, 1},
                                       {{.expert = 2}, {1, 2, 4}, 4},
                                       {{.expert = 4}, {4, 4, 4}, 4},
                                       {{.expert = 1}, {2, 2, 4}, 4},
                                       {{.tensor = 2, .expert = 2}, {1, 1, 2}, 4},
                                       {{.expert = 2}, {1, 1, 1}, 2}};

void run_job(const SavedJob& job, const std::function<void(MoeRank&)>& body) {
  comm::run_local(job.ranks, [&](comm::Fabric& fabric) {
    MoeJob options{.axes = job.axes, .strategy = {.degrees = job.degrees}, .adamw = true};
    options.net.shared_hidden = 8;
    MoeRank rank(borrowed(fabric), options);
    body(rank);
  });
}

std::vector<checkpoint::Piece> pieces_of(MoeRank& rank) {
  return checkpoint::model_pieces(rank.sharded(), &rank.optimizer());
}

void save(MoeRank& rank, const SavedJob& job) {
  checkpoint::Saver saver(rank.mesh().job(), {.folder = "/" + job.name(), .block_bytes = 512});
  saver.save({.step = 1,
              .layout = {rank.mesh().degree(mesh::axes::state), job.degrees},
              .axes = job.axes,
              .pieces = pieces_of(rank)});
}

class ExpertState : public ::testing::Test {
 protected:
  MemoryFiles memory_;
  os::ScopedFiles scoped_{memory_};
};

TEST_F(ExpertState, LoadsAtAnyDegreeBitwise) {
  std::map<std::string, Assembled> saved;
  for (const SavedJob& job : saved_jobs) {
    Assembled& values = saved[job.name()];
    run_job(job, [&](MoeRank& rank) {
      rank.step(0);
      values.add(pieces_of(rank));
      save(rank, job);
    });
    const os::Path path = os::Path("/" + job.name()) / "step-1";
    EXPECT_TRUE(checkpoint::verify(path).faults.empty()) << job.name();
    const auto stored = checkpoint::Checkpoint::open(path);
    const auto* const gate = stored.manifest().find("model/blocks.0.moe.experts.gate");
    ASSERT_NE(gate, nullptr);
    EXPECT_EQ(gate->shape, (std::vector<int64_t>{8, 12, 16}));
    EXPECT_NE(stored.manifest().find("optimizer/step/blocks.0.moe.experts.gate"), nullptr);
    EXPECT_EQ(stored.manifest().axes, job.axes);
  }
  for (const SavedJob& to : saved_jobs) {
    std::map<std::string, Assembled> loaded;
    for (const SavedJob& from : saved_jobs) loaded[from.name()];
    run_job(to, [&](MoeRank& rank) {
      for (const SavedJob& from : saved_jobs) {
        checkpoint::load_model(checkpoint::Checkpoint::open(os::Path("/" + from.name()) / "step-1"), rank.sharded(),
                               &rank.optimizer());
        loaded.at(from.name()).add(pieces_of(rank));
      }
    });
    for (const SavedJob& from : saved_jobs) {
      EXPECT_EQ(saved[from.name()].difference(loaded[from.name()]), "") << from.name() << " -> " << to.name();
    }
  }
}

TEST_F(ExpertState, WeightsGoOutAndInWhole) {
  for (const SavedJob& job : {saved_jobs[1], saved_jobs[2], saved_jobs[4]}) {
    Assembled values;
    run_job(job, [&](MoeRank& rank) {
      rank.step(0);
      values.add(checkpoint::model_pieces(rank.sharded(), nullptr));
      checkpoint::export_weights(rank.sharded(), "/live-" + job.name());
      save(rank, job);
    });
    checkpoint::export_weights(checkpoint::Checkpoint::open(os::Path("/" + job.name()) / "step-1"),
                               "/stored-" + job.name());
    for (const char* exported : {"/live-", "/stored-"}) {
      for (const SavedJob& to : {saved_jobs[0], saved_jobs[2], saved_jobs[4]}) {
        Assembled imported;
        run_job(to, [&](MoeRank& rank) {
          checkpoint::import_weights(checkpoint::WeightFiles::open(exported + job.name()), rank.sharded());
          imported.add(checkpoint::model_pieces(rank.sharded(), nullptr));
        });
        EXPECT_EQ(values.difference(imported), "") << exported << job.name() << " -> " << to.name();
      }
    }
  }
}

}  // namespace
}  // namespace tesserae::testing
