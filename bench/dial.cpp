// What it costs to turn the dial: the sharding degree of a model in training is changed, live. The candidate of
// bench/dial.py.
//
//   bench_dial --nproc 4 --degrees 4,2,1,4 --dimension 1024 --layers 8 --heads 16 --vocabulary 8192 --sequence 128
//
// Trains `--steps` steps under the first degree (of HYBRID_SHARD; 1 replicates, the number of ranks shards fully), then
// turns to the next and trains again, with AdamW all along. The report is JSON, and has for each change:
//   seconds        until the slowest rank could go on
//   lost_seconds   how much later the first step after it ended than without it: seconds, and what that step took more
//                  than one of its kind
//   bytes          that ranks sent each other, as the engine counts them, over all ranks; link_bytes: what really went
//                  out of the host that sent most (loopback counts, shared memory does not)
//   needed_seconds what an all-gather of as many bytes between the same ranks takes, measured in this run
//   steps          seconds, in steps before and after it
//   *_pss          memory of all ranks (shared pages once): in training before and after; with --memory, the sum of
//                  each rank's peak while it changed. Sampling holds up page faults: seconds are off then.

#include <ATen/ops/zeros.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "bench/measure.h"
#include "bench/program.h"
#include "bench/training.h"
#include "tesserae/os/memory.h"
#include "tesserae/os/pages.h"

namespace tesserae::bench {
namespace {

using nlohmann::json;

struct Options {
  TrainingOptions training;
  std::vector<int> degrees = {4, 2, 1, 4};
  int steps = 3, warmup = 2;
  std::string backend = "auto";
  bool memory = false;
  bool touch = false;
};

/// The most memory that this process used while it lived: looked at every few milliseconds, by a thread of its own.
class PeakMemory {
 public:
  explicit PeakMemory(bool enabled) {
    if (enabled) watcher_ = std::thread([this] { watch(); });
  }
  ~PeakMemory() { stop(); }
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  double stop() {
    ended_ = true;
    if (watcher_.joinable()) watcher_.join();
    return peak_;
  }

 private:
  void watch() {
    do {
      peak_ = std::max(peak_, static_cast<double>(os::process_memory().proportional));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } while (!ended_);
  }

  std::atomic<bool> ended_ = false;
  double peak_ = 0;  // the watcher's until it was joined
  std::thread watcher_;
};

// Bytes that left this host through the interface of its links so far.
double sent_over_link() {
  const char* const named = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string interface = std::string(named != nullptr ? named : "lo") + ":";
  std::ifstream devices("/proc/self/net/dev");
  for (std::string line; std::getline(devices, line);) {
    const size_t at = line.find(interface);
    if (at == std::string::npos) continue;
    std::istringstream fields(line.substr(at + interface.size()));
    double value = 0;
    for (int field = 1; field <= 9; ++field) fields >> value;
    return value;
  }
  return 0;
}

mesh::Strategy strategy_of(int degree, int ranks) {
  return mesh::from_hybrid_shard_degree(degree, ranks);
}

class Bench {
 public:
  Bench(const Options& options, std::shared_ptr<comm::Fabric> fabric)
      : options_(options),
        ranks_(fabric->size()),
        training_(options.training, std::move(fabric), strategy_of(options.degrees.front(), ranks_)) {}

  json run() {
    for (int i = 0; i < options_.warmup; ++i) step();
    const double bytes_per_second = measure_transport();
    json changes = json::array();
    double before = median_step();
    double memory = memory_in_use();
    for (size_t i = 1; i < options_.degrees.size(); ++i) {
      json change = turn(options_.degrees[i - 1], options_.degrees[i]);
      touch_memory(options_.degrees[i - 1], options_.degrees[i]);  // the first step makes gradients
      const double first = step();
      const double after = median_step();
      const double seconds = change["seconds"];
      change["from"] = options_.degrees[i - 1];
      change["to"] = options_.degrees[i];
      change["step_before"] = before;
      change["first_step"] = first;
      change["step_after"] = after;
      change["lost_seconds"] = seconds + std::max(0.0, first - after);
      change["steps"] = {{"before", seconds / before}, {"after", seconds / after}};
      change["needed_seconds"] = change["bytes"].get<double>() / bytes_per_second;
      change["before_pss"] = memory;
      change["after_pss"] = memory = memory_in_use();
      changes.push_back(change);
      before = after;
    }
    return {{"ranks", ranks_},
            {"parameters", training_.sharded().parameter_count()},
            {"backend", options_.backend},
            {"transport_bytes_per_second", bytes_per_second},
            {"losses", losses_},
            {"changes", changes}};
  }

 private:
  // Seconds of a step of the slowest rank.
  double step() {
    training_.fabric().everyone().barrier();
    const Stopwatch watch;
    const double loss = training_.step().item<double>();
    const double seconds = training_.largest(watch.wall_us() / 1e6);
    losses_.push_back(training_.sum(loss) / ranks_);
    return seconds;
  }

  double median_step() {
    std::vector<double> seconds;
    for (int i = 0; i < options_.steps; ++i) seconds.push_back(step());
    return median(seconds);
  }

  json turn(int from, int degree) {
    touch_memory(from, degree);
    training_.fabric().everyone().barrier();
    const double link_before = sent_over_link();
    PeakMemory peak(options_.memory);
    const Stopwatch watch;
    const shard::Resharding done = training_.sharded().reshard(strategy_of(degree, ranks_).degrees);
    const double seconds = watch.wall_us() / 1e6;
    json change = {{"seconds", training_.largest(seconds)},
                   {"bytes", training_.sum(static_cast<double>(done.bytes))},
                   {"layout", mesh::to_string(done.to.degrees)}};
    change["link_bytes"] = training_.largest(sent_over_link() - link_before);
    if (options_.memory) change["peak_pss"] = training_.sum(peak.stop());
    return change;
  }

  // Takes memory and gives it back, on all ranks at once: afterwards the machine has so much free memory of its own. A
  // virtual machine may have lent its free memory to its host, and gets it back much more slowly than memory is
  // written.
  void touch_memory(int from, int to) {
    const double state = 4.0 * sizeof(float) * static_cast<double>(training_.sharded().parameter_count());
    const double growth = state / to - state / from;
    if (!options_.touch || growth <= 0) return;
    const auto bytes = static_cast<size_t>(1.25 * growth) + (size_t{128} << 20);
    training_.fabric().everyone().barrier();
    auto* const memory = static_cast<char*>(os::map_pages(bytes));
    std::memset(memory, 1, bytes);
    training_.fabric().everyone().barrier();
    os::unmap_pages(memory, bytes);
  }

  double memory_in_use() { return training_.sum(static_cast<double>(os::process_memory().proportional)); }

  // How fast the ranks move bytes between each other: received by all of them in an all-gather, a second.
  double measure_transport() {
    constexpr int64_t bytes = 64 << 20;
    const at::Tensor buffer = at::zeros({bytes / ranks_ * ranks_}, at::kByte).to(training_.fabric().device());
    std::vector<double> seconds;
    for (int repeat = 0; repeat < 4; ++repeat) {
      training_.fabric().everyone().barrier();
      const Stopwatch watch;
      training_.fabric().everyone().all_gather(buffer);
      const double slowest = training_.largest(watch.wall_us() / 1e6);
      if (repeat > 0) seconds.push_back(slowest);  // the first one warms up
    }
    return static_cast<double>(buffer.numel()) * (ranks_ - 1) / median(seconds);
  }

  const Options& options_;
  int ranks_;
  Training training_;
  std::vector<double> losses_;
};

}  // namespace
}  // namespace tesserae::bench

int main(int argc, char** argv) {
  using namespace tesserae;
  bench::Options options;
  CLI::App app("Measures what a change of the sharding degree costs while a transformer trains.");
  app.option_defaults()->always_capture_default();
  options.training.add_to(app);
  app.add_option("--degrees", options.degrees, "the first one, and those that it is turned to")->delimiter(',');
  app.add_option("--steps", options.steps, "timed steps before and after each change")->check(CLI::PositiveNumber);
  app.add_option("--warmup", options.warmup, "steps before those")->check(CLI::NonNegativeNumber);
  app.add_option("--backend", options.backend)->check(CLI::IsMember({"auto", "gloo", "shm", "staged"}));
  app.add_flag("--touch", options.touch,
               "before each change, take and give back as much memory as it is going to take");
  app.add_flag("--memory", options.memory, "sample memory during each change");
  return bench::run_program(
      "bench_dial", app, argc, argv, [&](const auto& fabric) { return bench::Bench(options, fabric).run(); },
      options.backend);
}
