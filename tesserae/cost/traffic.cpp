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

/// Whether no group of the hop can send more to other hosts.
bool sends_all_across(const Traffic::Hop& hop) {
  return hop.crosses && hop.across == hop.bytes;
}

void find_link(const Facts& facts, const Members& group, Traffic::Hop& hop) {
  if (!spans_hosts(facts, group.first, group.first + (group.members - 1) * group.stride)) return;
  hop.crosses = true;
  int near = 1;  // members on the host of the first
  if (facts.two_levels) {
    while (!spans_hosts(facts, group.first, group.first + near * group.stride)) ++near;
  }
  const double across = near > 1 ? hop.bytes * (group.members / near - 1) / (group.members - 1) : hop.bytes;
  hop.across = std::max(hop.across, across);
}

/// Of the groups of a hop, the one that sends the most to other hosts counts. Ranks of a host are consecutive and each
/// group is a run or a stride of ranks: its ends tell whether it spans hosts.
void find_links(const Facts& facts, int members, int stride, Traffic::Hop& hop) {
  if (members == 1) return;
  for (int block = 0; block < facts.ranks(); block += members * stride) {
    for (int first = block; first < block + stride; ++first) {
      if (sends_all_across(hop)) return;
      find_link(facts, {first, stride, members}, hop);
    }
  }
}

bool all_share_gathered(const Facts& facts, const mesh::Degrees& degrees) {
  for (int rank = 0; rank < facts.ranks(); ++rank) {
    if (!shares_gathered(facts, degrees, rank)) return false;
  }
  return true;
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

  find_links(facts, P, 1, traffic.gather);
  find_links(facts, G, 1, traffic.first_hop);
  find_links(facts, O / G, G, traffic.second_hop);
  find_links(facts, O / P, P, traffic.refresh);
  find_links(facts, N / O, O, traffic.third_hop);
  if (P > 1 && all_share_gathered(facts, degrees)) {
    traffic.gather = {.bytes = 0, .calls = 2, .crosses = false};  // two meetings a step
  }
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
