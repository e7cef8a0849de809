// One transformer under one layout: what a step costs in time, memory and bytes.
//
//   bench_step --nproc 2 --dimension 1024 --layers 8 --heads 16 --vocabulary 8192 --sequence 128        (FULL_SHARD)
//   bench_step --nproc 4 --degrees 2,2,4 --precision bf16 ...       bench_step --nproc 4 --strategy ZERO_2 ...
//   bench_step --mode plain --nproc 2 ...                           no communication; the ceiling comes from it
//   bench_step --mode plain --data-ranks 2 ...                      one process on the same global batch
//   bench_step --backend null --ranks 512 ...                       one rank of 512 whose bytes go nowhere
//   bench_step --offload-activations --offload-state ...            what leaves the device, and comes back for its turn
//
// The report is JSON with the fields of bench/peers.py and what only we can tell: exposed communication, bytes sent,
// the buffer pool. A step is forward, backward, optimizer step and zero_grad; making the batch is outside the clock.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randint.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "bench/device.h"
#include "bench/measure.h"
#include "bench/plain_adamw.h"
#include "bench/start_ranks.h"
#include "bench/step_options.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/model/gpt.h"
#include "tesserae/model/init.h"
#include "tesserae/offload/activations.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/os/memory.h"
#include "tesserae/shard/activation_offload.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::bench {
namespace {

using nlohmann::json;

// What a run measured on this rank.
struct Timing {
  std::vector<double> step_ms;       // timed steps only
  std::vector<double> optimizer_ms;  // its part of each of them, where it was taken
  std::vector<double> losses;        // all steps
};

struct Batch {
  at::Tensor tokens, targets;
};

c10::Device device_of(const StepOptions& options, int local_rank) {
  return bench::device_of(options.device, local_rank, options.backend);
}

// The same numbers as batch_of in bench/transformer.py.
Batch batch_of(const StepOptions& options, int step, int rank, int ranks, c10::Device device) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + static_cast<uint64_t>(step) * ranks + rank);
  const auto tokens =
      at::randint(options.model.vocabulary, {options.batch, options.sequence + 1}, generator, at::kLong);
  return {tokens.slice(1, 0, -1).contiguous().to(device), tokens.slice(1, 1).contiguous().to(device)};
}

Batch global_batch(const StepOptions& options, int step, c10::Device device) {
  std::vector<at::Tensor> tokens, targets;
  for (int rank = 0; rank < options.data_ranks; ++rank) {
    const Batch part = batch_of(options, step, rank, options.data_ranks, device);
    tokens.push_back(part.tokens);
    targets.push_back(part.targets);
  }
  return {at::cat(tokens), at::cat(targets)};
}

// `train` is one step and returns its loss; `before_timing` runs between the warm-up and the timed steps.
Timing time_steps(const StepOptions& options, c10::Device device, const std::function<Batch(int step)>& batch,
                  const std::function<at::Tensor(const Batch&)>& train, const std::function<void()>& before_timing) {
  Timing timing;
  for (int step = 0; step < options.warmup + options.steps; ++step) {
    const Batch data = batch(step);
    if (step == options.warmup) before_timing();
    const Stopwatch watch;
    const at::Tensor loss = train(data);
    synchronize(device);
    if (step >= options.warmup) timing.step_ms.push_back(watch.wall_us() / 1e3);
    timing.losses.push_back(loss.item<double>());
  }
  return timing;
}

json report_of(const StepOptions& options, const Timing& timing, int ranks, int64_t parameters, uint64_t base_rss) {
  const int64_t tokens = options.batch * options.sequence * (options.data_ranks > 0 ? options.data_ranks : ranks);
  json report = {{"mode", options.mode},
                 {"ranks", ranks},
                 {"parameters", parameters},
                 {"precision", options.precision},
                 {"device", options.device},
                 {"tokens_per_step", tokens},
                 {"step_ms", timing.step_ms},
                 {"tokens_per_second", static_cast<double>(tokens) / median(timing.step_ms) * 1e3},
                 {"losses", timing.losses},
                 {"base_rss_bytes", base_rss},
                 {"peak_rss_bytes", os::peak_resident()}};
  if (options.device != "cpu") {
    const auto stats = at::accelerator::getDeviceStats(at::accelerator::getDeviceIndex());
    report["peak_device_bytes"] = stats.allocated_bytes[0].peak;  // of all pools
  }
  if (!timing.optimizer_ms.empty()) report["optimizer_ms"] = timing.optimizer_ms;
  return report;
}

void write(const StepOptions& options, const json& report) {
  if (options.json.empty()) {
    std::printf("%s\n", report.dump(1).c_str());
  } else {
    std::ofstream(options.json) << report.dump(1) << "\n";
  }
}

std::shared_ptr<comm::Fabric> connect(const StepOptions& options, const mesh::World& world) {
  comm::FabricOptions how;
  how.backend = options.backend;
  how.device = device_of(options, world.launch().local_rank);
  return comm::Fabric::connect(world, how);
}

void run_plain(const StepOptions& options) {
  at::set_num_threads(1);
  const auto world = mesh::World::from_environment();
  const c10::Device device = device_of(options, world.launch().local_rank);
  const uint64_t base_rss = os::peak_resident();
  model::GptConfig config = options.model;
  config.device = device;
  model::Gpt model(config);
  model->checkpoint_activations_of_blocks(options.checkpoint_activations);
  PlainAdamW optimizer(*model, options.precision == "bf16" ? at::kBFloat16 : at::kFloat);

  const auto batch = [&](int step) {
    return options.data_ranks > 0 ? global_batch(options, step, device)
                                  : batch_of(options, step, world.rank(), world.size(), device);
  };
  std::vector<double> optimizer_ms;
  const auto train = [&](const Batch& data) {
    const at::Tensor loss = model->forward(data.tokens, data.targets);
    loss.backward();
    synchronize(device);
    const Stopwatch watch;
    optimizer.step();
    optimizer.zero_grad();
    synchronize(device);
    optimizer_ms.push_back(watch.wall_us() / 1e3);
    return loss.detach();
  };
  // Nothing in a step is communication, but the timed steps of all ranks begin together: they share the machine.
  std::shared_ptr<comm::Fabric> fabric;
  if (world.size() > 1) fabric = connect(options, world);
  const auto together = [&] {
    if (fabric) fabric->everyone().barrier();
  };
  Timing timing = time_steps(options, device, batch, train, together);
  together();  // nobody's last steps are quicker because others have left
  timing.optimizer_ms.assign(optimizer_ms.begin() + options.warmup, optimizer_ms.end());
  if (world.rank() == 0) {
    write(options, report_of(options, timing, world.size(), model::sizes(options.model).total, base_rss));
  }
}

json offload_report(const offload::Activations& activations, const offload::ActivationCounters& before, int steps) {
  const offload::ActivationCounters now = activations.counters();
  return {{"to", activations.shelf()},
          {"out_bytes_per_step", (now.out - before.out) / steps},
          {"in_bytes_per_step", (now.in - before.in) / steps},
          {"most_away_bytes", now.most_away},
          {"waited_ms", (now.waited - before.waited) * 1e3 / steps}};
}

json engine_report(const shard::Statistics& before, const shard::Statistics& after, uint64_t bytes, int steps) {
  const auto per_step_ms = [&](double shard::Statistics::*field) {
    return (after.*field - before.*field) * 1e3 / steps;
  };
  return {{"exposed_gather_ms", per_step_ms(&shard::Statistics::exposed_gather)},
          {"exposed_reduce_ms", per_step_ms(&shard::Statistics::exposed_reduce)},
          {"bytes_per_step", bytes / steps},
          {"gathers_per_step", static_cast<double>(after.gathers - before.gathers) / steps},
          {"prefetch_hits_per_step", static_cast<double>(after.prefetch_hits - before.prefetch_hits) / steps},
          {"reductions_per_step", static_cast<double>(after.reductions - before.reductions) / steps},
          {"departures", after.departures},
          {"allocations_in_timed_steps", after.allocations - before.allocations},
          {"pool_misses", after.pool_misses},
          {"pool_reserved_bytes", after.pool_reserved_bytes},
          {"state_bytes", after.state_bytes}};
}

void run_sharded(const StepOptions& options, const std::shared_ptr<comm::Fabric>& fabric) {
  at::set_num_threads(options.threads);
  const uint64_t base_rss = os::peak_resident();
  model::GptConfig config = options.model;
  config.device = options.whole_model ? fabric->device() : c10::Device(c10::kMeta);
  model::Gpt model(config);
  model->checkpoint_activations_of_blocks(options.checkpoint_activations);
  shard::Options how;
  how.strategy = options.strategy_of(fabric->size());
  how.precision = options.precision_of();
  how.limit_all_gathers = options.limit_all_gathers;
  how.limit_reductions = options.limit_reductions;
  how.parameter_wire = comm::wire_of(options.parameter_wire);
  how.gradient_wire = comm::wire_of(options.gradient_wire);
  how.initialize = model::initialize(options.model);
  if (options.offload_state) how.tiers = {offload::Tier::host, offload::Tier::host, offload::Tier::host};
  auto sharded = shard::shard_model(model, fabric, how);
  optim::AdamW optimizer(sharded);
  std::shared_ptr<offload::Activations> activations;
  if (options.offload_activations) {
    activations = offload::Activations::make({.smallest = options.activation_size, .folder = options.scratch});
    shard::offload_activations(sharded.engine(), activations);
  }

  shard::Statistics before;
  offload::ActivationCounters left_before;
  uint64_t bytes_before = 0;
  const auto before_timing = [&] {
    fabric->everyone().barrier();
    before = sharded.statistics();
    if (activations) left_before = activations->counters();
    bytes_before = fabric->counters().bytes();
  };
  const auto batch = [&](int step) {
    return batch_of(options, step, fabric->rank(), fabric->size(), fabric->device());
  };
  optim::StepOptions step_options;
  step_options.measure_norm = false;  // the peers do not compute it either
  const auto train = [&](const Batch& data) {
    const at::Tensor loss = model->forward(data.tokens, data.targets);
    loss.backward();
    optimizer.step(step_options);
    optimizer.zero_grad();
    return loss.detach();
  };
  Timing timing = time_steps(options, fabric->device(), batch, train, before_timing);
  const shard::Statistics after = sharded.statistics();
  const uint64_t bytes = fabric->counters().bytes() - bytes_before;

  for (double& loss : timing.losses) loss = sharded.sum_over_ranks(loss) / fabric->size();
  json report = report_of(options, timing, fabric->size(), sharded.parameter_count(), base_rss);
  report["layout"] = mesh::to_string(how.strategy.degrees);
  report["peak_rss_bytes_of_all"] = sharded.sum_over_ranks(static_cast<double>(os::peak_resident()));
  report["engine"] = engine_report(before, after, bytes, options.steps);
  report["state_on_host"] = options.offload_state;
  if (activations) report["activations"] = offload_report(*activations, left_before, options.steps);
  if (fabric->rank() == 0) write(options, report);
}

void run(const StepOptions& options) {
  if (options.mode == "plain") return run_plain(options);
  if (options.backend == "local") {
    return comm::run_local(options.ranks, [&](comm::Fabric& fabric) {
      run_sharded(options, std::shared_ptr<comm::Fabric>(&fabric, [](comm::Fabric*) {}));  // run_local owns it
    });
  }
  if (options.backend == "null") {
    const auto world = mesh::World::single_host(0, options.ranks);
    return run_sharded(options, comm::Fabric::null(world, device_of(options, 0)));
  }
  run_sharded(options, connect(options, mesh::World::from_environment()));
}

// Ranks that --nproc started see RANK, and run.
bool starts_ranks(const StepOptions& options) {
  return options.nproc > 0 && std::getenv("RANK") == nullptr;
}

}  // namespace
}  // namespace tesserae::bench

int main(int argc, char** argv) {
  using namespace tesserae;
  bench::StepOptions options;
  if (const int status = bench::parse(argc, argv, options); status >= 0) return status;
  try {
    if (bench::starts_ranks(options)) return bench::start_ranks(options.nproc, argc, argv);
    os::keep_freed_memory();  // as `tesserae train` does
    bench::run(options);
  } catch (const comm::PeerLost& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
    return launch::exit_peer_lost;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
    return 1;
  }
  return 0;
}
