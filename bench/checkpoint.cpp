// What saving and loading the training state of a transformer cost: the candidate of bench/checkpoint.py.
//
//   bench_checkpoint --nproc 4 --dimension 1024 --layers 8 --heads 16 --vocabulary 8192 --sequence 128 --folder /tmp/x
//
// Under FULL_SHARD with AdamW. The report is JSON with the fields of bench/checkpoint_peer.py, all in seconds:
//   step           a training step with nothing else going on
//   save           a synchronous save, until it is committed and synced
//   load           opening a checkpoint until the model could train on
//   async_call     how long an asynchronous save holds training up: in the call, and before the next optimizer step
//   async_lost     how much longer the steps after that call take in all, the call included
//   checksum       what a save spends on checksums
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "bench/measure.h"
#include "tesserae/checkpoint/checkpoint.h"
#include "tesserae/checkpoint/checksum.h"
#include "tesserae/model/gpt.h"
#include "tesserae/model/init.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/os/program.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/train/launcher.h"

namespace tesserae::bench {
namespace {

using nlohmann::json;

struct Options {
  int nproc = 0;
  model::GptConfig model;
  int64_t sequence = 128;
  int64_t batch = 1;
  std::string precision = "fp32";
  os::Path folder;
  int saves = 3;
  int steps = 3;
  std::string json;
};

/// A model in training on one rank, and the clock that all ranks stop together.
class Bench {
 public:
  Bench(const Options& options, std::shared_ptr<comm::Fabric> fabric)
      : options_(options),
        fabric_(std::move(fabric)),
        model_(on_meta(options.model)),
        sharded_(shard(model_, fabric_, options)),
        optimizer_(sharded_),
        saver_(fabric_, {.folder = options.folder, .keep = 1}) {}

  json run() {
    for (int i = 0; i < 2; ++i) step();
    measure("step", options_.steps, [this] { step(); });
    for (int i = 0; i < options_.saves; ++i) save_asynchronously();
    measure("save", options_.saves, [this] { saver_.save(state(), /*asynchronous=*/false); });
    measure("load", options_.saves, [this] { load(); });
    measure("checksum", options_.saves, [this] { hash(); });
    report_["ranks"] = fabric_->size();
    report_["parameters"] = sharded_.parameter_count();
    report_["bytes"] = checkpoint::Checkpoint::open(newest()).manifest().bytes();
    return report_;
  }

 private:
  static model::Gpt on_meta(model::GptConfig config) {
    config.device = c10::kMeta;
    return model::Gpt(config);
  }

  static shard::Sharded shard(model::Gpt& model, const std::shared_ptr<comm::Fabric>& fabric, const Options& options) {
    shard::Options how;
    how.strategy = mesh::preset("FULL_SHARD", fabric->size());
    if (options.precision == "bf16") how.precision = shard::Precision::bf16();
    how.initialize = model::initialize(options.model);
    return shard::shard_model(model, fabric, how);
  }

  void step() {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(
        1000 + static_cast<uint64_t>(steps_++ * fabric_->size() + fabric_->rank()));
    const auto tokens =
        at::randint(options_.model.vocabulary, {options_.batch, options_.sequence + 1}, generator, at::kLong);
    model_->forward(tokens.slice(1, 0, -1).contiguous(), tokens.slice(1, 1).contiguous()).backward();
    const Stopwatch watch;
    saver_.wait_copied();
    waited_ += watch.wall_us() / 1e6;
    optimizer_.step({.measure_norm = false});
    optimizer_.zero_grad();
  }

  checkpoint::State state() {
    return {.step = steps_,
            .layout = mesh::Layout(fabric_->size(), sharded_.options().strategy.degrees),
            .pieces = checkpoint::model_pieces(sharded_, &optimizer_)};
  }

  void save_asynchronously() {
    fabric_->everyone().barrier();
    const Stopwatch all;
    waited_ = 0;
    const Stopwatch call;
    saver_.save(state(), /*asynchronous=*/true);
    const double called = call.wall_us() / 1e6;
    for (int i = 0; i < options_.steps; ++i) step();
    fabric_->everyone().barrier();
    report_["async_call"].push_back(called + waited_);
    report_["async_steps"].push_back(all.wall_us() / 1e6);
    saver_.finish();
  }

  os::Path newest() const { return checkpoint::list_checkpoints(options_.folder).back().path; }

  void load() {
    checkpoint::load_model(checkpoint::Checkpoint::open(newest()), sharded_, &optimizer_);
    checkpoint::publish_model(sharded_);
  }

  void hash() {
    for (const checkpoint::Piece& piece : checkpoint::model_pieces(sharded_, &optimizer_)) {
      if (!piece.written) continue;
      const auto* bytes = static_cast<const char*>(piece.data.const_data_ptr());
      const size_t block = static_cast<size_t>(saver_.options().block_bytes);
      for (size_t at = 0; at < piece.data.nbytes(); at += block) {
        sum_ ^= checkpoint::checksum({bytes + at, std::min(block, piece.data.nbytes() - at)});
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
  model::Gpt model_;
  shard::Sharded sharded_;
  optim::AdamW optimizer_;
  checkpoint::Saver saver_;
  json report_;
  int64_t steps_ = 0;
  double waited_ = 0;
  uint64_t sum_ = 0;
};

int parse(int argc, char** argv, Options& o) {
  CLI::App app("Measures saving and loading of a transformer's training state.");
  app.add_option("--nproc", o.nproc, "start so many ranks on this host");
  app.add_option("--dimension", o.model.dimension)->required();
  app.add_option("--layers", o.model.layers)->required();
  app.add_option("--heads", o.model.heads)->required();
  app.add_option("--vocabulary", o.model.vocabulary)->required();
  app.add_option("--sequence", o.sequence)->check(CLI::PositiveNumber);
  app.add_option("--batch", o.batch)->check(CLI::PositiveNumber);
  app.add_option("--precision", o.precision)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--folder", o.folder, "where checkpoints go")->required();
  app.add_option("--saves", o.saves, "of each kind")->check(CLI::PositiveNumber);
  app.add_option("--steps", o.steps, "after each asynchronous save")->check(CLI::PositiveNumber);
  app.add_option("--json", o.json, "where rank 0 writes its report; default: standard output");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  o.model.tied = false;
  o.model.max_sequence = o.sequence;
  return -1;
}

int start_ranks(const Options& options, int argc, char** argv) {
  train::LocalJob job;
  job.ranks = options.nproc;
  job.command = {os::program_path()};
  job.command.insert(job.command.end(), argv + 1, argv + argc);
  job.environment = {{"OMP_NUM_THREADS", "1"}};
  return train::run_local_job(job);
}

void run(const Options& options) {
  at::set_num_threads(1);
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const json report = Bench(options, fabric).run();
  if (fabric->rank() != 0) return;
  if (options.json.empty()) {
    std::printf("%s\n", report.dump(1).c_str());
  } else {
    std::ofstream(options.json) << report.dump(1) << "\n";
  }
}

}  // namespace
}  // namespace tesserae::bench

int main(int argc, char** argv) {
  using namespace tesserae;
  bench::Options options;
  if (const int status = bench::parse(argc, argv, options); status >= 0) return status;
  try {
    if (options.nproc > 0 && std::getenv("RANK") == nullptr) return bench::start_ranks(options, argc, argv);
    bench::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_checkpoint: %s\n", error.what());
    return 1;
  }
  return 0;
}
