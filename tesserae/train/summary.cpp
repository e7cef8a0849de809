#include "tesserae/train/summary.h"

#include <algorithm>

#include "tesserae/os/clock.h"

namespace tesserae::train {

config::Json make_summary(const RunFigures& figures, const RunFacts& facts) {
  const auto or_null = [](const std::optional<double>& value) {
    return value ? config::Json(*value) : config::Json(nullptr);
  };
  const mesh::Degrees& degrees = facts.layout.degrees();
  const uint64_t peak = facts.peak_memory.empty() ? 0 : *std::ranges::max_element(facts.peak_memory);
  config::Json summary = {
      {"steps", figures.steps},
      {"final_loss", figures.final_loss},
      {"last_loss", figures.last_loss},
      {"val_loss", or_null(figures.val_loss)},
      {"best_val_loss", or_null(figures.best_val_loss)},
      {"tokens_per_second", figures.tokens_per_second},
      {"step_ms_median", figures.step_ms_median},
      {"comm_share", figures.comm_share},
      {"peak_memory_bytes", peak},
      {"peak_memory_bytes_by_rank", facts.peak_memory},
      {"memory_bytes_sum", facts.memory_sum},
      {"layout",
       {{"N", facts.layout.ranks()}, {"P", degrees.parameters}, {"G", degrees.gradients}, {"O", degrees.optimizer}}},
      {"tensor_parallel_degree", facts.mesh.degree(mesh::axes::tensor)},
      {"context_parallel_degree", facts.mesh.degree(mesh::Axis::context)},
      {"expert_parallel_degree", facts.mesh.degree(mesh::Axis::expert)},
      {"parameters", facts.parameters},
      {"world_size", facts.mesh.ranks()},
      {"hosts", facts.hosts},
      {"device", facts.device},
      {"precision", facts.precision},
      {"tokens", figures.tokens},
      {"seconds", facts.seconds},
      {"bytes_sent", facts.bytes_sent},
      {"engine",
       {{"gathers", facts.engine.gathers},
        {"prefetch_hits", facts.engine.prefetch_hits},
        {"reductions", facts.engine.reductions},
        {"gradients_in_place", facts.engine.gradients_in_place},
        {"departures", facts.engine.departures},
        {"pool_reserved_bytes", facts.engine.pool_reserved_bytes},
        {"pool_misses", facts.engine.pool_misses},
        {"state_bytes", facts.engine.state_bytes}}},
      {"dial",
       {{"changes", facts.dial.changes},
        {"seconds", facts.dial.seconds},
        {"bytes_moved", facts.dial.bytes},
        {"steps_spent_on_trying", facts.dial.steps_spent}}},
      {"ended", os::utc_time()}};
  if (facts.activations) {
    summary["activations"] = {{"out", facts.activations->out},
                              {"in", facts.activations->in},
                              {"stayed", facts.activations->stayed},
                              {"most_away", facts.activations->most_away},
                              {"waited_seconds", facts.activations->waited}};
  }
  if (facts.checkpoints) {
    summary["checkpoints"] = {{"saved", facts.checkpoints->saved},
                              {"failed", facts.checkpoints->failed},
                              {"waited_seconds", facts.checkpoints->waited_seconds}};
    if (const auto& memory = facts.checkpoints->in_memory) {
      summary["checkpoints"]["in_memory"] = {{"copies", memory->copies},
                                             {"bytes", memory->bytes},
                                             {"seconds", memory->seconds},
                                             {"waited_seconds", memory->waited_seconds}};
      if (memory->sent.bytes > 0) {
        summary["checkpoints"]["in_memory"]["to_another_host"] = {{"bytes", memory->sent.bytes},
                                                                  {"seconds", memory->sent.seconds}};
      }
    }
  }
  if (facts.origin) summary["resumed"] = {{"step", facts.origin->step}, {"from", facts.origin->from}};
  if (!facts.recoveries.empty()) summary["recoveries"] = facts.recoveries;
  if (!facts.scalings.empty()) summary["scalings"] = facts.scalings;
  if (!facts.sharings.empty()) summary["experts_shared_out"] = facts.sharings;
  if (!facts.bad_steps.empty()) summary["bad_steps"] = facts.bad_steps;
  if (!facts.differing_replicas.empty()) summary["differing_replicas"] = facts.differing_replicas;
  if (!facts.broken_off.empty()) summary["broken_off"] = facts.broken_off;
  if (facts.stopped_by != 0) {
    summary["stopped_by_signal"] = facts.stopped_by;
    summary["stopped_by"] = facts.stop_reason;
  }
  return summary;
}

}  // namespace tesserae::train
