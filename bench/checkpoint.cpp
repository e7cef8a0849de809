// What saving and loading the training state of a transformer cost: the candidate of bench/checkpoint.py.
//
//   bench_checkpoint --nproc 4 --dimension 1024 --layers 8 --heads 16 --vocabulary 8192 --sequence 128 --folder /tmp/x
//
// Under FULL_SHARD with AdamW. The report is JSON with the fields of bench/checkpoint_peer.py, all in seconds:
//   step           a training step with nothing else going on
//   save           a synchronous save, until it is committed and synced
//   load           opening a checkpoint until the model could train on
//   async_call     how long an asynchronous save holds training up: in the call, and before the next optimizer step
//   async_step     the first step after that call, beside the save
//   async_steps    that call and all steps after it; checkpoint.py takes off as many steps with nothing else going on
//   checksum       what a save spends on checksums

#include <CLI/CLI.hpp>
#include <functional>
#include <nlohmann/json.hpp>

#include "bench/measure.h"
#include "bench/program.h"
#include "bench/training.h"
#include "tesserae/base/checksum.h"
#include "tesserae/checkpoint/checkpoint.h"

namespace tesserae::bench {
namespace {

using nlohmann::json;

struct Options {
  TrainingOptions training;
  os::Path folder;
  int saves = 3;
  int steps = 3;
};

/// A model in training on one rank, and the clock that all ranks stop together.
class Bench {
 public:
  Bench(const Options& options, std::shared_ptr<comm::Fabric> fabric)
      : options_(options),
        fabric_(fabric),
        training_(options.training, fabric, mesh::preset("FULL_SHARD", fabric->size())),
        saver_(std::move(fabric), {.folder = options.folder, .keep = 1}) {}

  json run() {
    for (int i = 0; i < 2; ++i) step();
    measure("step", options_.steps, [this] { step(); });
    for (int i = 0; i < options_.saves; ++i) save_asynchronously();
    measure("save", options_.saves, [this] { saver_.save(state(), /*asynchronous=*/false); });
    measure("load", options_.saves, [this] { load(); });
    if (fabric_->device().is_cpu()) measure("checksum", options_.saves, [this] { hash(); });
    report_["ranks"] = fabric_->size();
    report_["parameters"] = training_.sharded().parameter_count();
    report_["bytes"] = checkpoint::Checkpoint::open(newest()).manifest().bytes();
    return report_;
  }

 private:
  void step() {
    training_.backward();
    const Stopwatch watch;
    saver_.wait_copied();
    waited_ += watch.wall_us() / 1e6;
    training_.update();
  }

  checkpoint::State state() {
    return {.step = training_.steps(),
            .layout = mesh::Layout(fabric_->size(), training_.sharded().options().strategy.degrees),
            .pieces = checkpoint::model_pieces(training_.sharded(), &training_.optimizer())};
  }

  void save_asynchronously() {
    fabric_->everyone().barrier();
    const Stopwatch all;
    waited_ = 0;
    const Stopwatch call;
    saver_.save(state(), /*asynchronous=*/true);
    const double called = call.wall_us() / 1e6;
    const Stopwatch first;
    for (int i = 0; i < options_.steps; ++i) {
      step();
      if (i == 0) report_["async_step"].push_back(first.wall_us() / 1e6);
    }
    fabric_->everyone().barrier();
    report_["async_call"].push_back(called + waited_);
    report_["async_steps"].push_back(all.wall_us() / 1e6);
    saver_.finish();
  }

  os::Path newest() const { return checkpoint::list_checkpoints(options_.folder).back().path; }

  void load() {
    checkpoint::load_model(checkpoint::Checkpoint::open(newest()), training_.sharded(), &training_.optimizer());
    checkpoint::publish_model(training_.sharded());
  }

  void hash() {
    for (const checkpoint::Piece& piece : checkpoint::model_pieces(training_.sharded(), &training_.optimizer())) {
      if (!piece.written) continue;
      const auto* bytes = static_cast<const char*>(piece.data.const_data_ptr());
      const size_t block = static_cast<size_t>(saver_.options().block_bytes);
      for (size_t at = 0; at < piece.data.nbytes(); at += block) {
        sum_ ^= checksum({bytes + at, std::min(block, piece.data.nbytes() - at)});
      }
    }
  }

  void measure(const std::string& name, int times, const std::function<void()>& action) {
    for (int i = 0; i < times; ++i) {
      fabric_->everyone().barrier();
      const Stopwatch watch;
      action();
      fabric_->everyone().barrier();
      report_[name].push_back(watch.wall_us() / 1e6);
    }
  }

  const Options& options_;
  std::shared_ptr<comm::Fabric> fabric_;
  Training training_;
  checkpoint::Saver saver_;
  json report_;
  double waited_ = 0;
  uint64_t sum_ = 0;
};

}  // namespace
}  // namespace tesserae::bench

int main(int argc, char** argv) {
  using namespace tesserae;
  bench::Options options;
  CLI::App app("Measures saving and loading of a transformer's training state.");
  options.training.add_to(app);
  app.add_option("--folder", options.folder, "where checkpoints go")->required();
  app.add_option("--saves", options.saves, "of each kind")->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "after each asynchronous save")->check(CLI::PositiveNumber);
  return bench::run_program("bench_checkpoint", app, argc, argv,
                            [&](const auto& fabric) { return bench::Bench(options, fabric).run(); });
}
