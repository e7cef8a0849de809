#include "bench/step_options.h"

#include <CLI/CLI.hpp>

#include "bench/device.h"

namespace tesserae::bench {

mesh::Strategy StepOptions::strategy_of(int job_ranks) const {
  mesh::Strategy value;
  if (degrees.empty()) {
    value = mesh::preset(strategy, job_ranks, degree);
  } else {
    value.degrees = {degrees[0], degrees[1], degrees[2]};
  }
  if (keep_after_forward) value.free_after_forward = false;
  if (keep_after_backward) value.free_after_backward = false;
  return value;
}

shard::Precision StepOptions::precision_of() const {
  return precision == "bf16" ? shard::Precision::bf16() : shard::Precision::fp32();
}

int parse(int argc, char** argv, StepOptions& o) {
  CLI::App app(
      "Trains one transformer under one layout and reports what a step costs.\n"
      "Ranks come from a launcher's environment (torchrun, srun, mpirun), or are started with --nproc.");
  app.option_defaults()->always_capture_default();
  app.add_option("--mode", o.mode)->check(CLI::IsMember({"sharded", "plain"}));
  app.add_option("--nproc", o.nproc, "start so many ranks on this host");
  app.add_option("--data-ranks", o.data_ranks, "plain: train in one process on the batches of so many ranks");

  app.add_option("--dimension", o.model.dimension)->required();
  app.add_option("--layers", o.model.layers)->required();
  app.add_option("--heads", o.model.heads)->required();
  app.add_option("--kv-heads", o.model.kv_heads, "0: as many as heads");
  app.add_option("--feed-forward", o.model.feed_forward, "0: 8/3 of dimension, rounded up to 32");
  app.add_option("--vocabulary", o.model.vocabulary)->required();
  app.add_flag("--tied,!--untied", o.model.tied)->default_val(false);
  app.add_option("--sequence", o.sequence)->required()->check(CLI::PositiveNumber);
  app.add_option("--batch", o.batch, "sequences a rank and step")->check(CLI::PositiveNumber);
  app.add_flag("--checkpoint-activations", o.checkpoint_activations, "recompute each block in backward");
  app.add_flag("--whole-model", o.whole_model, "build the whole model in memory before it is sharded");
  app.add_flag("--offload-activations", o.offload_activations,
               "activations leave after forward: to pinned memory, or from the host to a disk");
  app.add_option("--activation-size", o.activation_size, "bytes of the smallest that leaves")
      ->check(CLI::PositiveNumber);
  app.add_flag("--offload-state", o.offload_state, "training state in memory of the host");
  app.add_option("--threads", o.threads, "of a rank, on the host")->check(CLI::PositiveNumber);
  app.add_option("--scratch", o.scratch, "folder for activations of the host");

  auto* strategy = app.add_option("--strategy", o.strategy)->check(CLI::IsMember(mesh::preset_names()));
  app.add_option("--degree", o.degree, "of HYBRID_SHARD, HYBRID_SHARD_ZERO2 and ZERO_PP");
  app.add_option("--degrees", o.degrees, "P,G,O")->delimiter(',')->expected(3)->excludes(strategy);
  app.add_flag("--keep-after-forward", o.keep_after_forward, "do not free gathered parameters after forward");
  app.add_flag("--keep-after-backward", o.keep_after_backward, "nor after backward");
  app.add_option("--precision", o.precision)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--limit-all-gathers", o.limit_all_gathers);
  app.add_option("--limit-reductions", o.limit_reductions);
  app.add_option("--parameter-wire", o.parameter_wire, "how parameters travel between hosts")
      ->check(CLI::IsMember({"exact", "int8"}));
  app.add_option("--gradient-wire", o.gradient_wire, "how gradients do")
      ->check(CLI::IsMember({"exact", "int8", "int4"}));

  app.add_option("--backend", o.backend)
      ->check(CLI::IsMember({"auto", "gloo", "shm", "nccl", "staged", "null", "local"}));
  app.add_option("--ranks", o.ranks, "of the backends null and local")->check(CLI::PositiveNumber);
  app.add_option("--device", o.device)->check(CLI::IsMember(device_names));
  app.add_option("--steps", o.steps, "timed steps")->check(CLI::PositiveNumber);
  app.add_option("--warmup", o.warmup, "steps before those")->check(CLI::NonNegativeNumber);
  app.add_option("--json", o.json, "where rank 0 writes its report; default: standard output");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  o.model.max_sequence = o.sequence;
  return -1;
}

}  // namespace tesserae::bench
