// What the engine costs the host per unit and step when no byte is moved: 64 units, each a linear layer of width 8 with
// bias, fully sharded over 8 ranks of the null transport, against the same modules unsharded. bench/host_cost_python.py
// is the same for FSDP1 and FSDP2.
//
//   bench_host_cost [--units 64] [--ranks 8] [--repeats 15] [--steps 50] [--device cuda] [--json FILE]
//
// "watched" is the sharded one with the monitor's stopwatch (monitor/step_timer.h) attached.
//
// "set_up" is what sharding the model takes, and the heap that it then holds beside the model, in groups of 8 ranks
// (HYBRID_SHARD): what grows with the number of ranks is what a rank knows of the job.
//
// Both kinds are interleaved and the order alternates. "step" is forward and backward; the optimizer (fused AdamW,
// which for the engine includes publishing the new parameters) is a line of its own.
//
// Instructions do not depend on how busy the machine is. Count them for each kind; the difference divided by units and
// steps is the cost of one unit:
//   valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*measured_step*' bench_host_cost --only sharded
//       --repeats 1 --steps 10
//   valgrind ... --only plain ...

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <malloc.h>
#include <torch/nn/modules/linear.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/device.h"
#include "bench/measure.h"
#include "bench/plain_adamw.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/strategy.h"
#include "tesserae/monitor/step_timer.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/shard/unit.h"

namespace tesserae::bench {
namespace {

constexpr int64_t width = 8;

struct Options {
  int units = 64, ranks = 8, repeats = 15, steps = 50;
  std::string strategy = "FULL_SHARD", device = "cpu", only, json;
};

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int units) {
    for (int i = 0; i < units; ++i) links.push_back(register_module("link" + std::to_string(i), Link(width, width)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& link : links) x = link(x);
    return x;
  }
  using Link = shard::Unit<torch::nn::Linear>;
  std::vector<Link> links;
};
using Chain = shard::Unit<ChainImpl>;

// One kind of model and what each repeat took, in microseconds a step.
struct Subject {
  std::string name;
  Chain model{nullptr};
  std::optional<shard::Sharded> sharded;
  std::optional<optim::AdamW> adamw;
  std::optional<PlainAdamW> plain_adamw;
  std::shared_ptr<monitor::StepTimer> timer;
  int64_t steps = 0;
  std::vector<double> step_us, cpu_us, optimizer_us;
};

std::unique_ptr<Subject> make_subject(const std::string& name, const Options& options, c10::Device device) {
  auto subject = std::make_unique<Subject>();
  subject->name = name;
  subject->model = Chain(options.units);
  subject->model->to(device);
  if (name == "plain") {
    subject->plain_adamw.emplace(*subject->model, at::kFloat);
  } else {
    const auto fabric = comm::Fabric::null(mesh::World::single_host(0, options.ranks), device);
    shard::Options how;
    how.strategy = mesh::preset(options.strategy, options.ranks);
    subject->sharded.emplace(shard::shard_model(subject->model, fabric, how));
    subject->adamw.emplace(*subject->sharded);
  }
  if (name == "watched") {
    subject->timer = std::make_shared<monitor::StepTimer>();
    subject->timer->attach(subject->sharded->engine());
  }
  return subject;
}

// Not inlined, and named by the callgrind command above.
[[gnu::noinline]] void measured_step(Subject& subject, const at::Tensor& x) {
  if (subject.timer) subject.timer->enter(monitor::Stage::forward);
  subject.model(x).sum().backward();
  if (subject.timer) subject.timer->end_step(++subject.steps);
  synchronize(x.device());
}

void optimizer_step(Subject& subject, c10::Device device) {
  if (subject.adamw) {
    // The norm would be one more all-reduce, which the unsharded side does not do.
    subject.adamw->step({.lr = {}, .clip_norm = 0, .scaler = nullptr, .measure_norm = false});
    subject.adamw->zero_grad();
  } else {
    subject.plain_adamw->step();
    subject.plain_adamw->zero_grad();
  }
  synchronize(device);
}

void run_repeat(Subject& subject, const at::Tensor& x, int steps) {
  double step = 0, cpu = 0, optimizer = 0;
  for (int i = 0; i < steps; ++i) {
    const Stopwatch forward_backward;
    measured_step(subject, x);
    step += forward_backward.wall_us();
    cpu += forward_backward.cpu_us();
    const Stopwatch update;
    optimizer_step(subject, x.device());
    optimizer += update.wall_us();
  }
  subject.step_us.push_back(step / steps);
  subject.cpu_us.push_back(cpu / steps);
  subject.optimizer_us.push_back(optimizer / steps);
}

double heap_bytes() {
  const auto info = ::mallinfo2();
  return static_cast<double>(info.uordblks + info.hblkhd);
}

nlohmann::json measure_set_up(const Options& options, c10::Device device) {
  nlohmann::json figures;
  for (const int ranks : {8, 8, options.ranks}) {  // the first one also makes what a process makes once
    Chain model(options.units);
    model->to(device);
    const double before = heap_bytes();
    const Stopwatch watch;
    const auto fabric = comm::Fabric::null(mesh::World::single_host(0, ranks), device);
    shard::Options how;
    how.strategy = mesh::preset("HYBRID_SHARD", ranks, std::min(8, ranks));
    const auto sharded = shard::shard_model(model, fabric, how);
    figures = {{"ms", watch.wall_us() / 1e3}, {"bytes", heap_bytes() - before}};
  }
  return figures;
}

nlohmann::json report(const Options& options, const std::vector<std::unique_ptr<Subject>>& subjects) {
  nlohmann::json report = {{"units", options.units},       {"ranks", options.ranks}, {"device", options.device},
                           {"strategy", options.strategy}, {"steps", options.steps}, {"repeats", options.repeats}};
  const auto& plain = *subjects.front();
  for (const auto& subject : subjects) {
    const auto over_plain = [&](std::vector<double> Subject::*kind) {
      return (median((*subject).*kind) - median(plain.*kind)) / options.units;
    };
    report[subject->name] = {{"step_us", median(subject->step_us)},
                             {"fastest_us", *std::min_element(subject->step_us.begin(), subject->step_us.end())},
                             {"cpu_us", median(subject->cpu_us)},
                             {"optimizer_us", median(subject->optimizer_us)},
                             {"per_unit_us", over_plain(&Subject::step_us)},
                             {"cpu_per_unit_us", over_plain(&Subject::cpu_us)},
                             {"optimizer_per_unit_us", over_plain(&Subject::optimizer_us)}};
    std::printf(
        "%-8s step %8.0f us, over plain %6.1f us a unit (%.1f us of CPU time); optimizer %7.0f us, over plain %.1f\n",
        subject->name.c_str(), median(subject->step_us), over_plain(&Subject::step_us), over_plain(&Subject::cpu_us),
        median(subject->optimizer_us), over_plain(&Subject::optimizer_us));
    if (subject->sharded) {
      const auto statistics = subject->sharded->statistics();
      report[subject->name]["pool_misses"] = statistics.pool_misses;
      report[subject->name]["gathers_per_step"] = static_cast<double>(statistics.gathers) / statistics.steps;
      report[subject->name]["prefetch_hits_per_step"] =
          static_cast<double>(statistics.prefetch_hits) / statistics.steps;
    }
  }
  return report;
}

void run(const Options& options) {
  at::set_num_threads(1);
  const c10::Device device = device_of(options.device, 0);
  std::vector<std::unique_ptr<Subject>> subjects;
  for (const char* name : {"plain", "sharded", "watched"}) {
    if (options.only.empty() || options.only == name) subjects.push_back(make_subject(name, options, device));
  }
  const at::Tensor x = at::randn({4, width}, device);
  for (const auto& subject : subjects) {  // warms up
    subject->model(x).sum().backward();
    optimizer_step(*subject, device);
    subject->model(x).sum().backward();
    optimizer_step(*subject, device);
  }
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    for (size_t i = 0; i < subjects.size(); ++i)
      run_repeat(*subjects[(i + repeat) % subjects.size()], x, options.steps);
  }
  auto figures = report(options, subjects);
  figures["set_up"] = measure_set_up(options, device);
  if (!options.json.empty()) std::ofstream(options.json) << figures.dump(1) << "\n";
}

}  // namespace
}  // namespace tesserae::bench

int main(int argc, char** argv) {
  tesserae::bench::Options options;
  CLI::App app("Host cost of the engine per unit and step, with no bytes moved");
  app.add_option("--units", options.units)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--ranks", options.ranks)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--repeats", options.repeats)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", options.steps, "a repeat")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--strategy", options.strategy)->capture_default_str();
  app.add_option("--device", options.device)
      ->check(CLI::IsMember(tesserae::bench::device_names))
      ->capture_default_str();
  app.add_option("--only", options.only, "measure this kind alone")->check(CLI::IsMember({"plain", "sharded"}));
  app.add_option("--json", options.json, "also write the figures to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    tesserae::bench::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_host_cost: %s\n", error.what());
    return 1;
  }
  return 0;
}
