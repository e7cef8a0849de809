#include "tesserae/checkpoint/model_state.h"

#include <gmock/gmock.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/verify.h"
#include "tesserae/optim/sgd.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/trained.h"

namespace tesserae::checkpoint {
namespace {

using testing::Assembled;
using ::testing::HasSubstr;
using testing::Trained;
using testing::with_degrees;

struct Job {
  int ranks;
  mesh::Degrees degrees;
  std::string name() const { return cat("N", ranks, " ", to_string(degrees)); }
  os::Path folder() const {
    return cat("/", ranks, "-", degrees.parameters, "-", degrees.gradients, "-", degrees.optimizer);
  }
};

std::vector<Job> all_jobs() {
  std::vector<Job> jobs;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const auto& degrees : mesh::all_degrees(ranks)) jobs.push_back({ranks, degrees});
  }
  return jobs;
}

class ModelState : public ::testing::Test {
 protected:
  /// Trains `steps` steps and saves; what was saved goes to `values`.
  os::Path train_and_save(const Job& job, const testing::NetOptions& net, int steps, Assembled& values) {
    os::Path path;
    comm::run_local(job.ranks, [&](comm::Fabric& fabric) {
      Trained trained(fabric, net, with_degrees(job.degrees));
      for (int step = 0; step < steps; ++step) trained.step();
      values.add(trained.state().pieces);
      Saver saver(testing::borrowed(fabric), {.folder = job.folder(), .block_bytes = 4096});
      saver.save(trained.state());
      if (fabric.rank() == 0) path = job.folder() / cat("step-", steps);
    });
    return path;
  }

  testing::MemoryFiles memory_;
  os::ScopedFiles scoped_{memory_};
};

// Every (N, layout) is saved, and every one of them is loaded into every (N', layout'): the bytes are the same.
TEST_F(ModelState, LoadsAnywhereBitwise) {
  const testing::NetOptions net{.blocks = 2, .frozen_matrix = true, .unused = true};
  const auto jobs = all_jobs();
  std::map<std::string, os::Path> saved;
  std::map<std::string, Assembled> values;
  for (const Job& job : jobs) saved[job.name()] = train_and_save(job, net, 1, values[job.name()]);

  for (const Job& job : jobs) {
    std::map<std::string, Assembled> loaded;
    for (const Job& from : jobs) loaded[from.name()];
    comm::run_local(job.ranks, [&](comm::Fabric& fabric) {
      Trained trained(fabric, net, with_degrees(job.degrees));
      for (const Job& from : jobs) {
        trained.load(Checkpoint::open(saved[from.name()]));
        loaded[from.name()].add(trained.state().pieces);
      }
    });
    for (const Job& from : jobs) {
      ASSERT_EQ(values[from.name()].difference(loaded[from.name()]), "") << from.name() << " -> " << job.name();
    }
  }
}

TEST_F(ModelState, PiecesHoldWhatTheEngineGathers) {
  for (const Job& job : {Job{4, {2, 2, 4}}, Job{3, {1, 1, 3}}, Job{4, {2, 4, 4}}}) {
    const testing::NetOptions net{.tied = true, .nested = true, .frozen_block = 1};
    Assembled pieces;
    std::map<std::string, std::string> gathered;
    comm::run_local(job.ranks, [&](comm::Fabric& fabric) {
      Trained trained(fabric, net, with_degrees(job.degrees));
      trained.step();
      pieces.add(model_pieces(trained.sharded(), nullptr));
      trained.sharded().visit_parameters([&](const std::string& name, const at::Tensor& value) {
        if (fabric.rank() != 0) return;
        gathered["model/" + name] = {static_cast<const char*>(value.contiguous().const_data_ptr()), value.nbytes()};
      });
    });
    gathered.erase("model/head");  // tied: saved once, under its first name
    EXPECT_EQ(pieces.bytes(), gathered) << job.name();
  }
}

TEST_F(ModelState, EachElementIsWrittenOnce) {
  for (const Job& job : all_jobs()) {
    std::map<std::string, int64_t> written;
    std::map<std::string, int64_t> size;
    std::mutex mutex;
    comm::run_local(job.ranks, [&](comm::Fabric& fabric) {
      Trained trained(fabric, {.blocks = 1, .frozen_matrix = true}, with_degrees(job.degrees));
      trained.step();
      const std::scoped_lock lock(mutex);
      for (const Piece& piece : trained.state().pieces) {
        if (piece.written) written[piece.name] += piece.elements.size();
        int64_t elements = 1;
        for (const int64_t length : piece.shape) elements *= length;
        size[piece.name] = elements;
        EXPECT_TRUE(!piece.written || fabric.rank() < job.degrees.optimizer) << "only the first replica writes";
      }
    });
    EXPECT_EQ(written, size) << job.name();
  }
}

// Training that stops, is saved, and goes on in new processes' objects: the same layout continues bitwise, others to
// rounding.
TEST_F(ModelState, TrainingGoesOnAsIfItHadNotStopped) {
  const testing::NetOptions net{.nested = true, .twice = 1};
  const Job origin{4, {2, 2, 4}};
  std::vector<double> uninterrupted;
  Assembled at_the_end;
  comm::run_local(origin.ranks, [&](comm::Fabric& fabric) {
    Trained trained(fabric, net, with_degrees(origin.degrees));
    for (int step = 0; step < 6; ++step) {
      const double loss = trained.step();
      if (fabric.rank() == 0) uninterrupted.push_back(loss);
    }
    at_the_end.add(trained.state().pieces);
  });
  Assembled unused;
  const os::Path path = train_and_save(origin, net, 3, unused);
  for (const Job& job :
       {origin, Job{4, {1, 1, 1}}, Job{4, {4, 4, 4}}, Job{2, {1, 2, 2}}, Job{8, {2, 4, 8}}, Job{1, {1, 1, 1}}}) {
    std::vector<double> losses;
    Assembled values;
    comm::run_local(job.ranks, [&](comm::Fabric& fabric) {
      Trained trained(fabric, net, with_degrees(job.degrees));
      trained.step();  // what was there before is overwritten: values, state and counters
      trained.load(Checkpoint::open(path));
      publish_model(trained.sharded());
      for (int step = 3; step < 6; ++step) {
        const double loss = trained.step();
        if (fabric.rank() == 0) losses.push_back(loss);
      }
      values.add(trained.state().pieces);
    });
    for (int i = 0; i < 3; ++i) {
      if (job.name() == origin.name()) {
        EXPECT_EQ(losses[i], uninterrupted[3 + i]);
      } else {
        EXPECT_NEAR(losses[i], uninterrupted[3 + i], 1e-5 * uninterrupted[3 + i]) << job.name();
      }
    }
    if (job.name() == origin.name()) {
      EXPECT_EQ(at_the_end.difference(values), "");
    }
  }
}

// A unit that had no gradient yet has no state; one that is loaded over it starts at zero.
TEST_F(ModelState, StateThatDoesNotExistYet) {
  const testing::NetOptions skipping{.skipped = 1};
  Assembled before;
  const os::Path path = train_and_save({2, {2, 2, 2}}, skipping, 2, before);
  EXPECT_EQ(Checkpoint::open(path).manifest().find("optimizer/exp_avg/block1.first"), nullptr);
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    trained.step();
    trained.load(Checkpoint::open(path));
    for (const Piece& piece : trained.state().pieces) {
      if (piece.name.starts_with("optimizer/") && piece.name.find("/block1.") != std::string::npos) {
        EXPECT_EQ(piece.data.count_nonzero().item<int64_t>(), 0) << piece.name;
      }
      if (piece.name.starts_with("optimizer/step/block0.")) {
        EXPECT_EQ(piece.data.item<float>(), 2) << piece.name;
      }
    }
  });
}

TEST_F(ModelState, AnotherModelOrOptimizerIsRefused) {
  Assembled unused;
  const os::Path path = train_and_save({1, {1, 1, 1}}, {}, 1, unused);
  const Checkpoint checkpoint = Checkpoint::open(path);
  auto refusal = [](const std::function<void()>& load) -> std::string {
    try {
      load();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  comm::run_local(1, [&](comm::Fabric& fabric) {
    Trained larger(fabric, {.blocks = 4}, {});
    EXPECT_THAT(refusal([&] { larger.load(checkpoint); }), HasSubstr("tensor \"model/block3.first\" is missing"));
    Trained wider(fabric, {.hidden = 30}, {});
    EXPECT_THAT(refusal([&] { wider.load(checkpoint); }), HasSubstr("has shape [29, 13], here it is [30, 13]"));
    Trained smaller(fabric, {.blocks = 2}, {});
    EXPECT_THAT(refusal([&] { smaller.load(checkpoint); }),
                HasSubstr("has model/block2.bias, which this model does not have"));
    Trained same(fabric, {}, {});
    optim::Sgd momentum(same.sharded(), {.momentum = 0.9});
    EXPECT_THAT(refusal([&] { load_model(checkpoint, same.sharded(), &momentum); }),
                HasSubstr("saved with another optimizer"));
    optim::Sgd plain(same.sharded());
    load_model(checkpoint, same.sharded(), &plain);
    load_model(checkpoint, same.sharded(), nullptr);
  });
}

// Saved as fp32 masters, loaded into a model whose masters are bf16, and the other way round.
TEST_F(ModelState, FloatingPointTypesAreConverted) {
  Assembled unused;
  const os::Path path = train_and_save({2, {2, 2, 2}}, {}, 1, unused);
  const Checkpoint checkpoint = Checkpoint::open(path);
  const std::string stored = checkpoint.read("model/block0.first");
  comm::run_local(3, [&](comm::Fabric& fabric) {
    shard::Options options = with_degrees({3, 3, 3});
    options.precision.masters = at::kBFloat16;
    Trained trained(fabric, testing::NetOptions{}, options);
    load_model(checkpoint, trained.sharded(), nullptr);
    int64_t seen = 0;
    for (const Piece& piece : model_pieces(trained.sharded(), nullptr)) {
      if (piece.name != "model/block0.first") continue;
      EXPECT_EQ(piece.data.scalar_type(), at::kBFloat16);
      for (int64_t i = 0; i < piece.elements.size(); ++i, ++seen) {
        float value = 0;
        std::memcpy(&value, stored.data() + (piece.elements.begin + i) * 4, 4);
        EXPECT_EQ(piece.data[i].item<float>(), static_cast<float>(c10::BFloat16(value)));
      }
    }
  });
}

}  // namespace
}  // namespace tesserae::checkpoint
