#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "tesserae/comm/agree.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/comm/sub_fabric.h"
#include "tesserae/model/gpt.h"
#include "tesserae/model/init.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/os/seconds.h"
#include "tesserae/plan/plan.h"
#include "tesserae/probe/measure.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/tensor/parallel.h"

// Whole steps of small models, trained as a job trains, beside what the pieces measured before add up to:
//  1. The ranks of each host shard a model over themselves: no link between hosts takes part.
//  2. Steps of three are timed: of narrow blocks, of wide ones with few tokens, and of these with many.
//  3. What they take longer than planned is an amount for each unit, one for each byte of parameters, and a share of
//     computing: three equations.
//  4. With these known, pairs of ranks split the layers of one more: what that takes longer is theirs, waiting for each
//     other at every call.
namespace tesserae::probe {
namespace {

struct Trial {
  model::GptConfig model;
  int64_t sequence, micro_batch;
  int tensor = 1;
};

struct Shape {
  int64_t layers, dimension, tokens;

  Trial trial(c10::Device device, int tensor = 1) const {
    const int64_t sequence = std::min<int64_t>(tokens, 512);
    return {
        .model = model::resolved(
            {.vocabulary = 512, .dimension = dimension, .layers = layers, .heads = dimension / 64, .device = device}),
        .sequence = sequence,
        .micro_batch = tokens / sequence,
        .tensor = tensor};
  }
};

/// As many as there are terms to find.
std::array<Shape, 3> trials_for(bool host_computes) {
  if (host_computes) return {{{8, 128, 128}, {4, 384, 128}, {4, 384, 1024}}};
  return {{{8, 512, 512}, {4, 2048, 512}, {4, 2048, 8192}}};
}

shard::Precision precision_for(const std::string& dtype) {
  return dtype == "bf16"   ? shard::Precision::bf16()
         : dtype == "fp16" ? shard::Precision::fp16()
                           : shard::Precision::fp32();
}

/// Of one element, where that is what a model has.
int bytes_of(std::optional<c10::ScalarType> dtype) {
  return static_cast<int>(c10::elementSize(dtype.value_or(at::kFloat)));
}

/// P, G and O of a trial: those of most jobs whose model fits.
mesh::Degrees degrees_for(int ranks) {
  return {1, ranks, ranks};
}

/// The median of some steps, on the slowest rank of all hosts.
double measured_step(const Bench& bench, const std::shared_ptr<comm::Fabric>& host, const Trial& trial,
                     const std::string& dtype) {
  constexpr int warm = 3, counted = 7;
  const auto mesh = std::make_shared<comm::MeshFabric>(host, mesh::Mesh(host->size(), {.tensor = trial.tensor}));
  const std::shared_ptr<comm::Fabric>& fabric = mesh->over(mesh::axes::state);
  model::GptConfig config = trial.model;
  config.parallel = std::make_shared<const tensor::Parallel>(mesh);
  model::Gpt model(config);
  tensor::fill_parameters(*model, model::initialize(config));
  shard::Options options{.strategy = {}, .precision = precision_for(dtype), .mesh = mesh};
  options.strategy.degrees = degrees_for(fabric->size());
  auto sharded = shard::shard_model(model, fabric, options);
  optim::AdamW optimizer(sharded, {.lr = 1e-4});
  const at::Tensor tokens = at::randint(config.vocabulary, {trial.micro_batch, trial.sequence},
                                        at::TensorOptions(bench.fabric.device()).dtype(at::kLong));
  std::vector<double> seconds;
  bench.fabric.everyone().barrier();
  for (int step = 0; step < warm + counted; ++step) {
    const os::TimePoint begin = os::now();
    model->forward(tokens, tokens).backward();
    optimizer.step({.clip_norm = 1.0});
    optimizer.zero_grad();
    wait_for_device(bench.fabric);
    if (step >= warm) seconds.push_back(os::seconds_since(begin));
  }
  std::ranges::sort(seconds);
  return comm::max_over_ranks(bench.fabric, seconds[counted / 2]);
}

plan::Entry planned_step(const cost::Machine& machine, int ranks, const Trial& trial, const std::string& dtype) {
  const shard::Precision precision = precision_for(dtype);
  const plan::Training training{.batch = trial.micro_batch * ranks / trial.tensor,
                                .run = {.sequence = trial.sequence,
                                        .micro_batch = trial.micro_batch,
                                        .compute_bytes = bytes_of(precision.parameters)},
                                .dtype = dtype,
                                .reduce_bytes = bytes_of(precision.reduce),
                                .two_hop = false};
  const plan::Cluster cluster{.devices = ranks, .per_host = ranks, .machine = machine};
  for (const plan::Entry& entry : plan::make_plan(cost::Transformer(trial.model), training, cluster)) {
    if (entry.tensor == trial.tensor && entry.degrees == degrees_for(ranks / trial.tensor)) return entry;
  }
  throw InvalidArgument("probe", cat("no plan for ", ranks, " ranks"));
}

}  // namespace

void measure_steps(const Bench& bench, const std::string& dtype, cost::Machine& machine) {
  const std::shared_ptr<comm::Fabric> whole(std::shared_ptr<void>(), &bench.fabric);  // it outlives what is here
  const auto host = comm::sub_fabric(whole, bench.fabric.world().host_ranks(bench.fabric.rank()));
  // Hosts may have different numbers of ranks: all plan as the first one.
  const auto ranks = static_cast<int>(bench.fabric.world().host_ranks(0).size());
  const auto shapes = trials_for(bench.fabric.device().is_cpu());
  const auto terms = std::ssize(shapes);
  std::vector<double> missing, known;  // a row of each trial: units, bytes of parameters, seconds of computing
  for (const Shape& shape : shapes) {
    bench.say(cat("whole steps in ", dtype, ", ", missing.size() + 1, " of ", terms));
    const Trial trial = shape.trial(bench.fabric.device());
    const plan::Entry planned = planned_step(machine, ranks, trial, dtype);
    missing.push_back(measured_step(bench, host, trial, dtype) - planned.seconds());
    const double bytes =
        static_cast<double>(cost::part_sizes(trial.model, 1).total) * bytes_of(precision_for(dtype).parameters);
    known.insert(known.end(), {static_cast<double>(shape.layers + 1), bytes, planned.compute});
  }
  const at::Tensor found =
      at::linalg_solve(at::tensor(known, at::kDouble).view({terms, terms}), at::tensor(missing, at::kDouble));
  cost::Machine::Compute& rates = machine.compute.at(dtype);
  rates.for_units = std::max(found[0].item<double>(), 0.0);
  rates.for_parameters = std::max(found[1].item<double>(), 0.0);
  rates.share_more = std::clamp(found[2].item<double>(), -0.2, 1.0);
  if (comm::max_over_ranks(bench.fabric, host->size() % 2) > 0) return;  // a rank of some host has no other
  bench.say(cat("whole steps of split layers in ", dtype));
  const Trial split = shapes.back().trial(bench.fabric.device(), 2);
  const plan::Entry planned = planned_step(machine, ranks, split, dtype);
  const double longer = measured_step(bench, host, split, dtype) - planned.seconds();
  rates.share_split = std::clamp(longer / planned.compute, 0.0, 1.0);
}

}  // namespace tesserae::probe
