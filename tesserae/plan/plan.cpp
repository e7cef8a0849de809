#include "tesserae/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"
#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/step_time.h"

namespace tesserae::plan {
namespace {

constexpr int64_t largest_batch = 1 << 30;
constexpr int most_devices = 1 << 18;  // each is looked at, for every layout: half a minute
constexpr int64_t largest_micro_batch = 256;
// Of what blocks keep: what the C library's heap, where ranks compute on the host, holds between its pieces. Found in
// 48 measured jobs (docs/plan.md); the logits are too large for that heap.
constexpr double heap_share = 0.06;
constexpr int64_t width_unit = 256;  // of a feed-forward layer that is chosen here: divisible by any sensible T

void check(const Training& training, const Cluster& cluster) {
  auto refuse = [](const std::string& what) { throw InvalidArgument("make_plan", what); };
  if (cluster.devices < 1 || cluster.per_host < 1)
    refuse(cat(cluster.devices, " devices, ", cluster.per_host, " a host"));
  if (cluster.devices > most_devices) refuse(cat(cluster.devices, " devices: a plan is of at most ", most_devices));
  if (cluster.devices > cluster.per_host && cluster.devices % cluster.per_host != 0) {
    refuse(cat(cluster.devices, " devices do not fill hosts of ", cluster.per_host));
  }
  const cost::Links& links = cluster.machine.links;
  if (!(cluster.machine.memory > 0) || !(links.inside > 0) || !(links.between > 0) || !(links.memory > 0)) {
    refuse("memory and links must be more than zero");
  }
  if (cluster.devices > cluster.per_host && !cluster.machine.knows_network) {
    refuse(cat(cluster.devices, " devices are on several hosts, but \"", cluster.machine.name,
               "\" was measured on one: ", "probe it on two, or say how fast the network is (--between-gbps)"));
  }
  if (!(cluster.headroom >= 0 && cluster.headroom < 1)) refuse(cat("headroom ", cluster.headroom, " is not in [0, 1)"));
  if (training.batch < 1 || training.run.sequence < 1 || training.run.micro_batch < 0 || training.run.context < 0 ||
      training.run.expert < 0 || training.batch > largest_batch) {
    refuse(cat("batch ", training.batch, ", sequence ", training.run.sequence, ", micro-batch ",
               training.run.micro_batch, ", context ", training.run.context, ", expert ", training.run.expert,
               ": one of them cannot be"));
  }
  if (training.run.micro_batch > training.batch) {
    refuse(cat("a micro-batch of ", training.run.micro_batch, " is more than the whole batch of ", training.batch));
  }
}

/// Degrees of the axes beside data.
struct Axes {
  int tensor = 1, context = 1, expert = 1;
};

/// Tensor-parallel ranks are neighbours: the data-parallel rank r of each tensor index is on the host of rank r T.
cost::Facts facts_of(const cost::Workload& workload, const Training& training, const Cluster& cluster,
                     const Axes& axes) {
  const int tensor = axes.tensor, ranks = cluster.devices / tensor;
  cost::Facts facts;
  for (int rank = 0; rank < ranks; ++rank) facts.host_of.push_back(rank * tensor / cluster.per_host);
  workload.set_sizes(facts, tensor, axes.expert);
  facts.compute_bytes = training.run.compute_bytes;
  facts.reduce_bytes = training.reduce_bytes;
  facts.master_bytes = training.master_bytes;
  facts.state_bytes = training.state_bytes;
  facts.gathers_at_once = training.gathers_at_once;
  facts.reductions_at_once = training.reductions_at_once;
  facts.free_after_forward = training.free_after_forward;
  facts.two_hop = training.two_hop;
  facts.tensor = std::min(tensor, cluster.per_host);
  facts.ranks_share_place = cluster.machine.shares_place;
  facts.shared_copy = cluster.machine.shared_copy;
  facts.two_levels = cost::goes_in_two_levels(facts);
  return facts;
}

/// What ranks of an axis send in a step, and how long that takes. `span`: of how many neighbours a group is part.
cost::Traffic::Hop hop_of(const cost::AxisTraffic& traffic, const Cluster& cluster, double times, int span) {
  const bool crosses = cluster.per_host % span != 0 && cluster.devices > cluster.per_host;
  const double bytes = traffic.bytes * times;
  return {.bytes = bytes,
          .calls = traffic.calls * times,
          .crosses = traffic.bytes > 0 && crosses,
          .across = crosses ? bytes : 0};
}

/// What does not depend on the degrees: the other axes, activations, computing.
Entry entry_of(const cost::Workload& workload, const Training& training, const Cluster& cluster, const Axes& axes,
               int64_t micro_batch) {
  const auto [tensor, context, expert] = axes;
  cost::Execution run = training.run;
  run.tensor = tensor;
  run.context = context;
  run.expert = expert;
  run.micro_batch = micro_batch;
  run.composed_norms = cluster.machine.shares_place;
  run.widened = cluster.machine.of(training.dtype).widened;
  Entry entry;
  entry.tensor = tensor;
  entry.context = context;
  entry.expert = expert;
  entry.ranks = cluster.devices / tensor;
  entry.micro_batch = micro_batch;
  entry.micro_batches = training.batch / (entry.ranks / context) / micro_batch;
  run.gradients_apart = run.compute_bytes != training.reduce_bytes || (entry.micro_batches > 1 && !training.two_hop);
  entry.activations = workload.activations(run);
  const auto times = static_cast<double>(entry.micro_batches);
  entry.tensor_hop = hop_of(workload.tensor_traffic(run), cluster, times, tensor);
  entry.context_hop = hop_of(workload.context_traffic(run), cluster, times, tensor * context);
  entry.expert_hop = hop_of(workload.expert_traffic(run), cluster, times, tensor * expert);
  // Ranks compute until they meet, and nothing hides that. What is measured is a meeting of all ranks: of several hosts
  // it says nothing of ranks that meet inside one.
  const auto shown = [&](const cost::Traffic::Hop& hop) {
    const bool is_such = hop.crosses || cluster.devices <= cluster.per_host;
    const double meeting = is_such ? cluster.machine.meeting : 0;
    return cost::hop_seconds(hop, cluster.machine.links) + hop.calls * meeting;
  };
  entry.compute = times * workload.compute_time(run, cluster.machine, training.dtype).total();
  entry.tensor_seconds = shown(entry.tensor_hop);
  if (tensor > 1) entry.tensor_seconds += cluster.machine.of(training.dtype).share_split * entry.compute;
  entry.context_seconds = shown(entry.context_hop);
  entry.expert_seconds = shown(entry.expert_hop);
  const double process = cluster.machine.shares_place ? workload.process() : 0;
  const int in_place = cluster.machine.shares_place ? std::min(cluster.devices, cluster.per_host) : 1;
  const bool in_heap = cluster.machine.shares_place && process == 0;  // a script's process is as it was traced
  entry.place_activations =
      in_place * (entry.activations.total() + (in_heap ? heap_share * entry.activations.blocks : 0));
  const cost::Machine::Compute& rates = cluster.machine.of(training.dtype);
  entry.process = in_place * std::max(rates.process + workload.workspace(run, rates.workspaces), process);
  return entry;
}

/// The better entry comes first.
auto rank_of(const Entry& entry) {
  return std::tuple(!entry.fits, entry.seconds(), entry.data_seconds, entry.memory());
}

/// Of one layout with different micro-batches; where none fits, the one that needs least.
auto choice_of(const Entry& entry) {
  return std::tuple(!entry.fits, entry.fits ? 0.0 : entry.memory(), rank_of(entry));
}

/// The sizes of a micro-batch that deal a rank's sequences out equally: the one that is asked for, or all.
std::vector<int64_t> micro_batches_for(const Training& training, int ranks) {
  if (training.batch % ranks != 0) return {};
  const int64_t sequences = training.batch / ranks;
  const int64_t asked = training.run.micro_batch;
  std::vector<int64_t> sizes;
  for (int64_t size = asked > 0 ? asked : 1; size <= (asked > 0 ? asked : largest_micro_batch); ++size) {
    if (sequences % size == 0) sizes.push_back(size);
  }
  return sizes;
}

/// All (P, G, O) for one degree of each other axis.
void add_entries(const cost::Workload& workload, const Training& training, const Cluster& cluster, const Axes& axes,
                 std::vector<Entry>& entries) {
  const int ranks = cluster.devices / axes.tensor;
  std::vector<Entry> candidates;
  for (const int64_t size : micro_batches_for(training, ranks / axes.context)) {
    candidates.push_back(entry_of(workload, training, cluster, axes, size));
  }
  if (candidates.empty()) return;
  cost::Facts facts = facts_of(workload, training, cluster, axes);
  for (const mesh::Degrees& degrees : mesh::all_degrees(ranks)) {
    for (Entry& entry : candidates) {
      facts.micro_batches = static_cast<int>(entry.micro_batches);
      entry.degrees = degrees;
      entry.state = cost::memory_of_rank(facts, degrees, 0);
      entry.place_state = cost::memory_of(facts, degrees);
      entry.fits = entry.memory() <= cluster.machine.memory * (1 - cluster.headroom);
      entry.data = cost::traffic_of(facts, degrees);
      const cost::MovingTime moving = cost::moving_time(facts, cluster.machine, degrees);
      const double shown = entry.compute + entry.tensor_seconds + entry.context_seconds + entry.expert_seconds;
      entry.data_seconds = moving.hops();
      const auto times = static_cast<double>(entry.micro_batches);
      entry.exposed_seconds =
          cost::exposed_time(moving,
                             {.computed = shown,
                              .micro_batches = times,
                              .reducing = facts.two_hop ? times : 1,
                              .root = static_cast<double>(facts.root_unit) / static_cast<double>(facts.parameters)},
                             cluster.machine);
      entry.optimizer_seconds = moving.optimizer;
      const double parameters = static_cast<double>(facts.parameters + facts.experts.parameters) * facts.compute_bytes;
      const cost::Machine::Compute& rates = cluster.machine.of(training.dtype);
      const auto units = static_cast<double>((facts.units + facts.experts.units) * entry.micro_batches);
      entry.engine_seconds = moving.adding + rates.for_units * units + rates.for_parameters * parameters;
      entry.meeting_seconds = moving.meetings;
    }
    entries.push_back(*std::ranges::min_element(candidates, {}, choice_of));
  }
}

/// Those that divide the ranks and the experts of a layer: the one that is asked for, or all.
std::vector<int> expert_degrees(const cost::Workload& workload, const Training& training, int ranks) {
  std::vector<int> degrees;
  for (int degree = 1; degree <= ranks; ++degree) {
    const bool asked = training.run.expert == 0 || training.run.expert == degree;
    const bool divides = degree == 1 || (workload.experts() > 0 && workload.experts() % degree == 0);
    if (asked && divides && ranks % degree == 0) degrees.push_back(degree);
  }
  return degrees;
}

double bytes_over(const Entry& entry, bool between) {
  double sum = 0;
  for (const cost::Traffic::Hop* hop :
       {&entry.tensor_hop, &entry.context_hop, &entry.expert_hop, &entry.data.gather, &entry.data.first_hop,
        &entry.data.second_hop, &entry.data.third_hop, &entry.data.refresh}) {
    if (hop->crosses == between) sum += hop->bytes;
  }
  return sum;
}

}  // namespace

double Entry::inside() const {
  return bytes_over(*this, false);
}

double Entry::between() const {
  return bytes_over(*this, true);
}

std::vector<Entry> make_plan(const cost::Workload& workload, const Training& training, const Cluster& cluster) {
  check(training, cluster);
  std::vector<Entry> entries;
  for (int tensor = 1; tensor <= cluster.devices; ++tensor) {
    if (cluster.devices % tensor != 0 || !workload.can_split(tensor)) continue;
    const int ranks = cluster.devices / tensor;
    for (int context = 1; context <= ranks; ++context) {
      const bool asked = training.run.context == 0 || training.run.context == context;
      if (!asked || ranks % context != 0 || !workload.can_cut(context)) continue;
      for (const int expert : expert_degrees(workload, training, ranks)) {
        add_entries(workload, training, cluster, {tensor, context, expert}, entries);
      }
    }
  }
  if (entries.empty()) {
    const int context = std::max(1, training.run.context), expert = std::max(1, training.run.expert);
    if (expert > 1 && (workload.experts() == 0 || workload.experts() % expert != 0 || cluster.devices % expert != 0)) {
      throw InvalidArgument("make_plan",
                            cat("an expert-parallel degree of ", expert, " does not divide ", cluster.devices,
                                " devices and the ", workload.experts(), " experts of a layer"));
    }
    if (!workload.can_cut(context)) {
      throw InvalidArgument("make_plan", cat("a context-parallel degree of ", context, ": sequences of this model ",
                                             "cannot be cut by the plan"));
    }
    if (cluster.devices % context != 0) {
      throw InvalidArgument(
          "make_plan", cat("a context-parallel degree of ", context, " does not divide ", cluster.devices, " devices"));
    }
    const int64_t unit = cluster.devices / context * std::max<int64_t>(1, training.run.micro_batch);
    throw InvalidArgument(
        "make_plan", cat("a batch of ", training.batch, " sequences cannot be dealt out equally to ", cluster.devices,
                         " devices at any tensor-parallel degree of this model",
                         training.run.context > 1 ? cat(" and context-parallel degree ", training.run.context) : "",
                         training.run.micro_batch > 0 ? cat(" in micro-batches of ", training.run.micro_batch) : "",
                         "; the nearest that can at degree 1 is ", round_up(training.batch, unit)));
  }
  std::ranges::stable_sort(entries, {}, rank_of);
  return entries;
}

model::GptConfig model_of(double parameters, model::GptConfig shape) {
  if (!(parameters >= 1 && parameters < 1e15)) throw InvalidArgument("model_of", cat(parameters, " parameters"));
  if (shape.heads == 0) shape.heads = std::max<int64_t>(1, shape.dimension / 128);
  shape.feed_forward = width_unit;
  const auto least = static_cast<double>(model::sizes(shape).total);
  const double per_width = 3.0 * static_cast<double>(shape.dimension) * static_cast<double>(shape.layers);
  const double left = std::round((parameters - least) / per_width / width_unit);
  if (left < 0) {
    throw InvalidArgument("model_of",
                          cat(parameters, " parameters are fewer than ", shape.layers, " layers of dimension ",
                              shape.dimension, " have without a feed-forward layer (", least, ")"));
  }
  shape.feed_forward += static_cast<int64_t>(left) * width_unit;
  return resolved(shape);
}

}  // namespace tesserae::plan
