#include "tesserae/cost/traffic.h"

#include <algorithm>

namespace tesserae::cost {
namespace {

double share_sent(int members) {
  return static_cast<double>(members - 1) / members;
}

/// The ranks first, first + stride, ... of which there are `members`.
struct Members {
  int first, stride, members;
};

/// Of the groups of a hop, the one that sends the most to other hosts counts.
void find_link(const Facts& facts, const Members& group, Traffic::Hop& hop) {
  if (!spans_hosts(facts, group.first, group.first + (group.members - 1) * group.stride)) return;
  hop.crosses = true;
  if (hop.across == hop.bytes) return;  // no group sends more
  int near = 1;                         // members on the host of the first
  if (facts.two_levels) {
    while (!spans_hosts(facts, group.first, group.first + near * group.stride)) ++near;
  }
  const double across = near > 1 ? hop.bytes * (group.members / near - 1) / (group.members - 1) : hop.bytes;
  hop.across = std::max(hop.across, across);
}

/// Of units that are sharded alike.
Traffic moved_by(const Facts& facts, const mesh::Degrees& degrees) {
  const auto [P, G, O] = degrees;
  const int N = facts.ranks();
  const auto elements = static_cast<double>(facts.parameters);
  const double trained = elements * facts.trained;
  const double c = facts.compute_bytes, g = facts.reduce_bytes;
  const double reductions = facts.two_hop ? facts.micro_batches : 1;
  double gathers = facts.micro_batches * (facts.free_after_forward ? 2.0 : 1.0);
  if (!facts.free_after_forward && !facts.free_after_backward) gathers = 1;

  Traffic traffic;
  const auto count = [&](Traffic::Hop& hop, int members, double bytes, double times) {
    if (members == 1) return;
    hop.bytes = bytes * share_sent(members) * times;
    hop.calls = facts.units * times;
  };
  count(traffic.gather, P, c * elements, gathers);
  count(traffic.first_hop, G, g * trained, reductions);
  count(traffic.second_hop, O / G, g * trained / G, 1);
  count(traffic.third_hop, N / O, 2 * g * trained / O, 1);
  count(traffic.refresh, O / P, c * elements / P, 1);

  // Ranks of a host are consecutive and each group is a run or a stride of ranks: its ends tell whether it spans hosts.
  bool all_share = P > 1;
  for (int rank = 0; rank < N; ++rank) {
    all_share = all_share && shares_gathered(facts, degrees, rank);
    const auto look = [&](Traffic::Hop& hop, int within, int stride) {
      if (rank % within < stride) find_link(facts, {rank, stride, within / stride}, hop);  // once, at its first rank
    };
    look(traffic.gather, P, 1);
    look(traffic.first_hop, G, 1);
    look(traffic.second_hop, O, G);
    look(traffic.refresh, O, P);
    look(traffic.third_hop, N, O);
  }
  if (all_share) traffic.gather = {.bytes = 0, .calls = 2, .crosses = false};  // two meetings a step
  return traffic;
}

/// Those of another part of the model: beside what is there.
void add(Traffic::Hop& hop, const Traffic::Hop& other) {
  hop.bytes += other.bytes;
  hop.calls += other.calls;
  hop.crosses = hop.crosses || other.crosses;
  hop.across += other.across;
}

}  // namespace

Traffic traffic_of(const Facts& facts, const mesh::Degrees& degrees) {
  Traffic traffic = moved_by(facts, degrees);
  if (facts.experts.parameters == 0) return traffic;
  // Ranks of every expert index send as much; of the first, hosts are as far apart as of any.
  const Facts experts = experts_of(facts, 0);
  const Traffic also = moved_by(experts, mesh::limited(degrees, experts.ranks()));
  for (const auto hop :
       {&Traffic::gather, &Traffic::first_hop, &Traffic::second_hop, &Traffic::third_hop, &Traffic::refresh}) {
    add(traffic.*hop, also.*hop);
  }
  return traffic;
}

}  // namespace tesserae::cost
