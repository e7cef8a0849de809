// Where the time of a step goes: forward, backward, the gradient norm, AdamW. The candidate of bench/phases.py.
//
//   bench_phases --nproc 2 --dimension 1024 --layers 8 --heads 16 --vocabulary 8192 --sequence 128
//
// All ranks begin each phase together; a phase takes as long as its slowest rank. The report is JSON:
//   milliseconds      of each phase, the median over the steps
//   adamw_bytes       what AdamW has to read (master, gradient, two moments) and to write (master, two moments) on a
//   rank adamw_gb_per_s    how fast it did memory_gb_per_s   how fast the same rank adds two arrays of the master's
//   size into a third, right after each step:
//                     the speed of memory while all ranks use it

#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/measure.h"
#include "bench/program.h"
#include "bench/training.h"
#include "tesserae/mesh/strategy.h"
#include "tesserae/optim/clip.h"
#include "tesserae/optim/target.h"
#include "tesserae/os/memory.h"

namespace tesserae::bench {
namespace {

struct Options {
  int steps = 10, warmup = 2;
  TrainingOptions training;
};

class Phases {
 public:
  Phases(const Options& options, const std::shared_ptr<comm::Fabric>& fabric)
      : options_(options),
        training_(options.training, fabric, mesh::preset("FULL_SHARD", fabric->size())),
        elements_(training_.sharded().parameter_count() / fabric->size()),
        left_(at::ones({elements_})),
        right_(at::ones({elements_})),
        sum_(at::ones({elements_})) {}

  nlohmann::json run() {
    for (int i = 0; i < options_.warmup; ++i) training_.step();
    for (int i = 0; i < options_.steps; ++i) step();
    nlohmann::json milliseconds;
    for (const auto& [phase, times] : milliseconds_) milliseconds[phase] = median(times);
    const double element = sizeof(float), adamw_bytes = 7 * element * static_cast<double>(elements_);
    const double added_bytes = 3 * element * static_cast<double>(elements_);
    return {{"ranks", training_.fabric().size()},
            {"parameters", training_.sharded().parameter_count()},
            {"milliseconds", milliseconds},
            {"adamw_bytes", adamw_bytes},
            {"adamw_gb_per_s", adamw_bytes / 1e6 / milliseconds["adamw"].get<double>()},
            {"memory_gb_per_s", added_bytes / 1e6 / milliseconds["add"].get<double>()}};
  }

 private:
  void step() {
    at::Tensor loss;
    time("forward", [&] { loss = training_.forward(); });
    time("backward", [&] { loss.backward(); });
    time("norm", [&] { optim::global_norm(*optim::target_of(training_.sharded())); });
    time("adamw", [&] { training_.optimizer().step({.measure_norm = false}); });
    time("zero_grad", [&] { training_.optimizer().zero_grad(); });
    time("add", [&] { at::add_out(sum_, left_, right_); });
  }

  void time(const char* phase, const std::function<void()>& body) {
    training_.fabric().everyone().barrier();
    const Stopwatch watch;
    body();
    milliseconds_[phase].push_back(training_.largest(watch.wall_us() / 1e3));
  }

  const Options& options_;
  Training training_;
  int64_t elements_;  // of this rank's masters, padding aside
  at::Tensor left_, right_, sum_;
  std::map<std::string, std::vector<double>> milliseconds_;
};

}  // namespace
}  // namespace tesserae::bench

int main(int argc, char** argv) {
  using namespace tesserae;
  bench::Options options;
  CLI::App app("Where the time of a training step goes.");
  app.option_defaults()->always_capture_default();
  options.training.add_to(app);
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber);
  app.add_option("--warmup", options.warmup, "steps before those")->check(CLI::NonNegativeNumber);
  os::keep_freed_memory();  // as `tesserae train` does
  return bench::run_program("bench_phases", app, argc, argv,
                            [&](const auto& fabric) { return bench::Phases(options, fabric).run(); });
}
