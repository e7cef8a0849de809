#include "tesserae/plan/table.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::plan {
namespace {

using Json = nlohmann::ordered_json;

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char text[512];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

/// Three digits or so, of large and of small numbers.
std::string digits(double value) {
  if (value == 0) return "0";
  if (value < 0.1) return format("%.2g", value);
  return format(value < 10 ? "%.2f" : value < 1000 ? "%.1f" : "%.0f", value);
}

/// In gigabytes, with a star where it leaves hosts.
std::string traffic(double bytes, bool crosses) {
  return cat(digits(bytes / 1e9), crosses && bytes > 0 ? "*" : " ");
}

Json hop(const cost::Traffic::Hop& hop) {
  return {{"bytes", hop.bytes}, {"calls", hop.calls}, {"between_hosts", hop.crosses}};
}

size_t count_fitting(const std::vector<Entry>& entries) {
  return static_cast<size_t>(std::ranges::count_if(entries, [](const Entry& entry) { return entry.fits; }));
}

/// `mixture`: with what belongs to experts.
std::string line_of(const Entry& entry, bool mixture) {
  const cost::Traffic& data = entry.data;
  const bool reduce_crosses = data.first_hop.crosses || data.second_hop.crosses || data.third_hop.crosses;
  const double reduce = data.first_hop.bytes + data.second_hop.bytes + data.third_hop.bytes;
  const auto [P, G, O] = entry.degrees;
  const std::string micro = cat(entry.micro_batches, "x", entry.micro_batch);
  std::string line = format("%5d %5d", entry.tensor, entry.context);
  if (mixture) line += format(" %5d", entry.expert);
  line += format(" %5d %5d %5d %5d %8s %4s", P, G, O, entry.ranks, micro.c_str(), entry.fits ? "yes" : "no");
  for (const double bytes : {entry.memory(), entry.place_state, entry.place_activations}) {
    line += format(" %8s", digits(bytes / 1e9).c_str());
  }
  for (const double bytes : {entry.inside(), entry.between()}) line += format(" %9s", digits(bytes / 1e9).c_str());
  std::vector<std::pair<double, bool>> hops = {{entry.tensor_hop.bytes, entry.tensor_hop.crosses},
                                               {entry.context_hop.bytes, entry.context_hop.crosses}};
  if (mixture) hops.emplace_back(entry.expert_hop.bytes, entry.expert_hop.crosses);
  hops.insert(
      hops.end(),
      {{data.gather.bytes, data.gather.crosses}, {reduce, reduce_crosses}, {data.refresh.bytes, data.refresh.crosses}});
  for (const auto& [bytes, crosses] : hops) line += format(" %9s", traffic(bytes, crosses).c_str());
  std::vector<double> times = {entry.compute, entry.tensor_seconds, entry.context_seconds};
  if (mixture) times.push_back(entry.expert_seconds);
  times.insert(times.end(), {entry.data_seconds, entry.optimizer_seconds, entry.seconds()});
  for (const double seconds : times) line += format(" %8s", digits(seconds).c_str());
  return line + "\n";
}

std::string heading(bool mixture) {
  const std::string gap(mixture ? 6 : 0, ' '), wide(mixture ? 10 : 0, ' ');
  return cat(
      gap, "                                                  memory of a place, GB     sent by a rank in a step, ",
      "GB (* leaves the host)", wide, "                               seconds of a step\n", "    T     C",
      mixture ? "     E" : "", "     P     G     O     N    micro fits    total    state  activ.    inside   ",
      "between    tensor   context", mixture ? "    expert" : "", "    gather    reduce   refresh  compute   tensor ",
      " context", mixture ? "   expert" : "", "     data    optim.    about\n");
}

}  // namespace

std::string as_text(const cost::Workload& workload, const Training& training, const Cluster& cluster,
                    const std::vector<Entry>& entries, size_t count) {
  std::string text = cat("model     ", workload.text(), "\n");
  const cost::Machine& machine = cluster.machine;
  const auto& products = machine.of(training.dtype).products.points();
  text += format("cluster   %d %s, %d a host, each %s with %.4g GB; %.4g GB/s inside a host, %.4g GB/s between hosts, ",
                 cluster.devices, machine.shares_place ? "ranks" : "devices", cluster.per_host,
                 machine.shares_place ? "host" : "device", machine.memory / 1e9, machine.links.inside / 1e9,
                 machine.links.between / 1e9);
  text += format("%.4g TFLOP/s in %s: ", products.back().rate / 1e12, training.dtype.c_str());
  text += cat(machine.name, machine.measured ? " (measured)\n" : " (data sheet)\n");
  const int64_t size = training.run.micro_batch;
  text += format(
      "step      %lld %s in micro-batches %s; %d bytes a parameter, %d a gradient, %d a "
      "master, %.4g of optimizer state; blocks %s\n",
      static_cast<long long>(training.batch), workload.unit_of_batch(training.run).c_str(),
      size > 0 ? cat("of ", size).c_str() : "as each layout has them", training.run.compute_bytes,
      training.reduce_bytes, training.master_bytes, training.state_bytes,
      training.run.recompute ? "are recomputed" : "keep their activations");
  text += format("layouts   %zu of %zu leave %.4g %% of memory free\n\n", count_fitting(entries), entries.size(),
                 100 * cluster.headroom);
  const bool mixture = workload.experts() > 0;
  text += heading(mixture);
  for (size_t i = 0; i < std::min(count, entries.size()); ++i) text += line_of(entries[i], mixture);
  return text;
}

Json as_json(const cost::Workload& workload, const Training& training, const Cluster& cluster,
             const std::vector<Entry>& entries, size_t count) {
  const int64_t size = training.run.micro_batch;
  Json result = {{"model", workload.json()},
                 {"cluster",
                  {{"devices", cluster.devices},
                   {"per_host", cluster.per_host},
                   {"headroom", cluster.headroom},
                   {"machine", cost::to_json(cluster.machine)}}},
                 {"step",
                  {{"batch", training.batch},
                   {"sequence", training.run.sequence},
                   {"micro_batch", size > 0 ? Json(size) : Json()},
                   {"compute_bytes", training.run.compute_bytes},
                   {"reduce_bytes", training.reduce_bytes},
                   {"master_bytes", training.master_bytes},
                   {"state_bytes", training.state_bytes},
                   {"recompute", training.run.recompute},
                   {"sequence_parallel", training.run.sequence_parallel},
                   {"two_hop", training.two_hop},
                   {"free_after_forward", training.free_after_forward}}},
                 {"layouts_total", entries.size()},
                 {"layouts_fitting", count_fitting(entries)},
                 {"layouts", Json::array()}};
  for (size_t i = 0; i < std::min(count, entries.size()); ++i) {
    const Entry& entry = entries[i];
    result["layouts"].push_back({{"tensor", entry.tensor},
                                 {"context", entry.context},
                                 {"expert", entry.expert},
                                 {"ranks", entry.ranks},
                                 {"parameters", entry.degrees.parameters},
                                 {"gradients", entry.degrees.gradients},
                                 {"optimizer", entry.degrees.optimizer},
                                 {"micro_batch", entry.micro_batch},
                                 {"micro_batches", entry.micro_batches},
                                 {"fits", entry.fits},
                                 {"memory",
                                  {{"total", entry.memory()},
                                   {"state", entry.place_state},
                                   {"activations", entry.place_activations},
                                   {"process", entry.process}}},
                                 {"memory_of_rank",
                                  {{"pieces", entry.state.pieces},
                                   {"masters", entry.state.masters},
                                   {"optimizer_state", entry.state.state},
                                   {"gradients", entry.state.gradients},
                                   {"gathered", entry.state.gathered},
                                   {"reductions", entry.state.reductions},
                                   {"activations", entry.activations.blocks},
                                   {"head", entry.activations.head},
                                   {"exchange", entry.activations.exchange}}},
                                 {"traffic",
                                  {{"inside_hosts", entry.inside()},
                                   {"between_hosts", entry.between()},
                                   {"tensor", hop(entry.tensor_hop)},
                                   {"context", hop(entry.context_hop)},
                                   {"expert", hop(entry.expert_hop)},
                                   {"gather", hop(entry.data.gather)},
                                   {"first_hop", hop(entry.data.first_hop)},
                                   {"second_hop", hop(entry.data.second_hop)},
                                   {"third_hop", hop(entry.data.third_hop)},
                                   {"refresh", hop(entry.data.refresh)}}},
                                 {"seconds",
                                  {{"compute", entry.compute},
                                   {"tensor", entry.tensor_seconds},
                                   {"context", entry.context_seconds},
                                   {"expert", entry.expert_seconds},
                                   {"data", entry.data_seconds},
                                   {"exposed", entry.exposed_seconds},
                                   {"optimizer", entry.optimizer_seconds},
                                   {"engine", entry.engine_seconds},
                                   {"meetings", entry.meeting_seconds},
                                   {"step", entry.seconds()}}}});
  }
  return result;
}

}  // namespace tesserae::plan
