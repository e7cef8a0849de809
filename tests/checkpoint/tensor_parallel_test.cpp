#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>

#include <atomic>
#include <nlohmann/json.hpp>

#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/verify.h"
#include "tesserae/checkpoint/weights.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/model/gpt.h"
#include "tesserae/tensor/parallel.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/trained.h"

// The training state of a model in tensor-parallel layers, on every combination of tensor-parallel degree and layout.
namespace tesserae::checkpoint {
namespace {

using testing::Assembled;

struct ParallelJob {
  int tensor;
  mesh::Degrees degrees;
  int ranks;  ///< data-parallel
  std::string name() const { return cat("T", tensor, "-N", ranks, "-", to_string(degrees)); }
};

/// One rank of a job: a model whose vocabulary no degree divides, after one step of AdamW.
class Rank {
 public:
  Rank(comm::Fabric& fabric, const ParallelJob& job)
      : job_(job),
        mesh_(std::make_shared<comm::MeshFabric>(testing::borrowed(fabric),
                                                 mesh::Mesh(fabric.size(), {.tensor = job.tensor}))),
        parallel_(std::make_shared<tensor::Parallel>(mesh_)),
        data_(mesh_->over(mesh::axes::state)),
        net_(config()),
        sharded_(shard::shard_model(net_, data_, options())),
        optimizer_(sharded_, {.lr = 0.01}) {}

  void step() {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(data_->rank()));
    const at::Tensor tokens = at::randint(29, {1, 8}, generator, at::TensorOptions().dtype(at::kLong));
    net_->forward(tokens, tokens).backward();
    optimizer_.step({});
    sharded_.zero_grad();
  }

  std::vector<Piece> pieces() { return model_pieces(sharded_, &optimizer_); }
  void save(const os::Path& folder) {
    Saver saver(mesh_->job(), {.folder = folder, .block_bytes = 512});
    saver.save({.step = 1, .layout = {job_.ranks, job_.degrees}, .axes = {.tensor = job_.tensor}, .pieces = pieces()});
  }
  void load(const Checkpoint& checkpoint) { load_model(checkpoint, sharded_, &optimizer_); }
  shard::Sharded& sharded() { return sharded_; }

 private:
  model::GptConfig config() const {
    model::GptConfig config{
        .vocabulary = 29, .dimension = 16, .layers = 1, .heads = 4, .feed_forward = 24, .tied = false};
    config.parallel = parallel_;
    return config;
  }
  shard::Options options() const {
    shard::Options options = testing::with_degrees(job_.degrees);
    options.mesh = mesh_;
    return options;
  }

  ParallelJob job_;
  std::shared_ptr<comm::MeshFabric> mesh_;
  std::shared_ptr<tensor::Parallel> parallel_;
  std::shared_ptr<comm::Fabric> data_;
  model::Gpt net_;
  shard::Sharded sharded_;
  optim::AdamW optimizer_;
};

void run(const ParallelJob& job, const std::function<void(Rank& rank)>& body) {
  comm::run_local(job.tensor * job.ranks, [&](comm::Fabric& fabric) {
    Rank rank(fabric, job);
    body(rank);
  });
}

const std::vector<ParallelJob> jobs{{1, {1, 1, 1}, 1}, {1, {2, 2, 4}, 4}, {2, {1, 1, 1}, 1}, {2, {1, 2, 2}, 2},
                                    {2, {2, 2, 4}, 4}, {4, {1, 1, 1}, 1}, {4, {2, 2, 2}, 2}, {4, {1, 1, 2}, 2}};

class TensorParallelState : public ::testing::Test {
 protected:
  testing::MemoryFiles memory_;
  os::ScopedFiles scoped_{memory_};
};

TEST_F(TensorParallelState, LoadsAnywhereBitwise) {
  std::map<std::string, Assembled> saved;
  for (const ParallelJob& job : jobs) {
    Assembled& values = saved[job.name()];
    run(job, [&](Rank& rank) {
      rank.step();
      values.add(rank.pieces());
      rank.save("/" + job.name());
    });
    const os::Path path = os::Path("/" + job.name()) / "step-1";
    EXPECT_TRUE(verify(path).faults.empty()) << job.name();
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.manifest().axes.tensor, job.tensor);
    EXPECT_EQ(checkpoint.manifest().find("model/embedding.weight")->shape, (std::vector<int64_t>{29, 16}));
    EXPECT_EQ(checkpoint.manifest().find("model/blocks.0.attention.output.weight")->split.first().parts, job.tensor);
  }
  for (const ParallelJob& to : jobs) {
    std::map<std::string, Assembled> loaded;
    for (const ParallelJob& from : jobs) loaded[from.name()];
    run(to, [&](Rank& rank) {
      for (const ParallelJob& from : jobs) {
        rank.load(Checkpoint::open(os::Path("/" + from.name()) / "step-1"));
        loaded[from.name()].add(rank.pieces());
      }
    });
    for (const ParallelJob& from : jobs) {
      EXPECT_EQ(saved[from.name()].difference(loaded[from.name()]), "") << from.name() << " -> " << to.name();
    }
  }
}

TEST_F(TensorParallelState, WeightsGoOutAndInWhole) {
  auto bytes_in = [](const WeightFiles& files) {
    std::map<std::string, std::string> bytes;
    for (const auto& [name, tensor] : files.tensors()) {
      bytes[name].resize(tensor.end - tensor.begin);
      files.read(name, 0, bytes[name]);
    }
    return bytes;
  };
  for (const ParallelJob& job : {jobs[3], jobs[5], jobs[6]}) {
    Assembled values;
    run(job, [&](Rank& rank) {
      rank.step();
      values.add(model_pieces(rank.sharded(), nullptr));
      export_weights(rank.sharded(), "/live-" + job.name());
      rank.save("/" + job.name());
    });
    const auto live = bytes_in(WeightFiles::open("/live-" + job.name()));
    export_weights(Checkpoint::open(os::Path("/" + job.name()) / "step-1"), "/stored-" + job.name());
    EXPECT_EQ(live, bytes_in(WeightFiles::open("/stored-" + job.name())));
    std::map<std::string, std::string> expected;
    for (const auto& [name, bytes] : values.bytes()) expected[name.substr(std::string_view("model/").size())] = bytes;
    EXPECT_EQ(live, expected);
    for (const ParallelJob& to : {jobs[0], jobs[4], jobs[7]}) {
      Assembled imported;
      run(to, [&](Rank& rank) {
        import_weights(WeightFiles::open("/live-" + job.name()), rank.sharded());
        imported.add(model_pieces(rank.sharded(), nullptr));
      });
      EXPECT_EQ(values.difference(imported), "") << job.name() << " -> " << to.name();
    }
  }
}

// The writer is one rank; the others, also those of other tensor indices, hear of its failure.
TEST_F(TensorParallelState, AFailedExportIsHeardByAll) {
  std::atomic<int> heard = 0;
  run(jobs[3], [&](Rank& rank) {
    export_weights(rank.sharded(), "/out");
    try {
      export_weights(rank.sharded(), "/out");
    } catch (const IoError&) {
      ++heard;
    }
  });
  EXPECT_EQ(heard, 4);
}

}  // namespace
}  // namespace tesserae::checkpoint
