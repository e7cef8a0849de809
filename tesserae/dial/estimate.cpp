#include "tesserae/dial/estimate.h"

#include <algorithm>
#include <cstdio>

#include "tesserae/base/error.h"

namespace tesserae::dial {
namespace {

// Half of the memory is for what nobody knows before the first step: activations.
constexpr double share_for_state = 0.5;

bool spans_hosts(const Facts& facts, int first, int last) {
  return facts.host_of[static_cast<size_t>(first)] != facts.host_of[static_cast<size_t>(last)];
}

/// What is gathered needs no memory of its own, and no message: the ranks of P see one copy.
bool shares(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  const int P = degrees.parameters;
  const int first = rank - rank % P;
  return facts.shared_copy && P > 1 && !spans_hosts(facts, first, first + P - 1);
}

double share_sent(int members) {
  return static_cast<double>(members - 1) / members;
}

double hop_seconds(const Traffic::Hop& hop, const Links& links) {
  const double latency = hop.crosses ? links.between_latency : links.inside_latency;
  return hop.across / links.between + (hop.bytes - hop.across) / links.inside + hop.calls * latency;
}

/// The ranks first, first + stride, ... of which there are `members`.
struct Members {
  int first, stride, members;
};

void find_link(const Facts& facts, const Members& group, Traffic::Hop& hop) {
  if (!spans_hosts(facts, group.first, group.first + (group.members - 1) * group.stride)) return;
  hop.crosses = true;
  int near = 1;  // members on the host of the first
  while (!spans_hosts(facts, group.first, group.first + near * group.stride)) ++near;
  const bool once = facts.two_levels && near > 1;
  hop.across = once ? hop.bytes * (group.members / near - 1) / (group.members - 1) : hop.bytes;
}

std::string in_words(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, bytes < 1e9 ? "%.1f MB" : "%.1f GB", bytes / (bytes < 1e9 ? 1e6 : 1e9));
  return text;
}

}  // namespace

RankMemory memory_of_rank(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  const auto [P, G, O] = degrees;
  const auto elements = static_cast<double>(facts.parameters);
  const bool shared = shares(facts, degrees, rank);
  const bool same_dtype = facts.compute_bytes == facts.master_bytes;
  RankMemory memory;
  if (P != O && !shared) memory.pieces = facts.compute_bytes * elements / P;
  // Masters of the dtype that is gathered are parts of the shared copy.
  if (!(shared && P == O && same_dtype)) memory.masters = facts.master_bytes * elements / O;
  memory.state = facts.state_bytes * elements / O;
  memory.gradients = facts.master_bytes * elements / O;
  if (facts.micro_batches > 1) memory.gradients += facts.reduce_bytes * elements / (facts.two_hop ? G : 1);

  const int inner = facts.units - 1;
  const auto root = static_cast<double>(facts.root_unit), largest = static_cast<double>(facts.largest_unit);
  const bool always_whole = P == 1 && (P != O || same_dtype);
  if (!always_whole && !shared) {
    const double in_flight =
        facts.free_after_forward ? root + largest * std::min(facts.gathers_at_once, inner) : elements;
    memory.gathered = facts.compute_bytes * in_flight;
  }
  memory.reductions = facts.reduce_bytes * (root + largest * std::min(facts.reductions_at_once, inner));
  return memory;
}

double memory_of(const Facts& facts, const mesh::Degrees& degrees) {
  const auto copy = static_cast<double>(facts.parameters) * facts.compute_bytes;
  const int neighbours = facts.ranks_share_place ? facts.tensor : 1;
  double fullest = 0, place = 0;
  for (int rank = 0; rank < facts.ranks(); ++rank) {
    const bool new_place = rank == 0 || !facts.ranks_share_place || spans_hosts(facts, rank - 1, rank);
    if (new_place) place = 0;
    place += neighbours * memory_of_rank(facts, degrees, rank).total();
    if (shares(facts, degrees, rank) && rank % degrees.parameters == 0) place += neighbours * copy;
    fullest = std::max(fullest, place);
  }
  return fullest;
}

Traffic traffic_of(const Facts& facts, const mesh::Degrees& degrees) {
  const auto [P, G, O] = degrees;
  const int N = facts.ranks();
  const auto elements = static_cast<double>(facts.parameters);
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
  count(traffic.first_hop, G, g * elements, reductions);
  count(traffic.second_hop, O / G, g * elements / G, 1);
  count(traffic.third_hop, N / O, 2 * g * elements / O, 1);
  count(traffic.refresh, O / P, c * elements / P, 1);

  // Ranks of a host are consecutive and each group is a run or a stride of ranks: its ends tell whether it spans hosts.
  bool all_share = P > 1;
  for (int rank = 0; rank < N; ++rank) {
    all_share = all_share && shares(facts, degrees, rank);
    const auto look = [&](Traffic::Hop& hop, int within, int stride) {
      find_link(facts, {rank - rank % within + rank % stride, stride, within / stride}, hop);
    };
    look(traffic.gather, P, 1);
    look(traffic.first_hop, G, 1);
    look(traffic.second_hop, O, G);
    look(traffic.refresh, O, P);
    find_link(facts, {rank % O, O, N / O}, traffic.third_hop);
  }
  if (all_share) traffic.gather = {.bytes = 0, .calls = 2, .crosses = false};  // two meetings a step
  return traffic;
}

double moving_seconds(const Facts& facts, const Links& links, const mesh::Degrees& degrees) {
  const Traffic traffic = traffic_of(facts, degrees);
  double seconds = 0;
  for (const Traffic::Hop* hop :
       {&traffic.gather, &traffic.first_hop, &traffic.second_hop, &traffic.third_hop, &traffic.refresh}) {
    seconds += hop_seconds(*hop, links);
  }
  // Master and state are read and written, the gradient is read.
  const double touched = (3.0 * facts.master_bytes + 2 * facts.state_bytes) * static_cast<double>(facts.parameters);
  return seconds + touched / degrees.optimizer / links.memory;
}

FirstChoice first_choice(const Facts& facts, const Links& links, double place, double available, double headroom) {
  const double room = (available - headroom * place) * share_for_state;
  struct Candidate {
    mesh::Degrees degrees;
    double memory, seconds;
  };
  const Candidate* fastest = nullptr;
  const Candidate* smallest = nullptr;
  std::vector<Candidate> candidates;
  for (const mesh::Degrees& degrees : mesh::all_degrees(facts.ranks())) {
    candidates.push_back({degrees, memory_of(facts, degrees), moving_seconds(facts, links, degrees)});
  }
  for (const Candidate& candidate : candidates) {
    if (smallest == nullptr || candidate.memory < smallest->memory) smallest = &candidate;
    if (candidate.memory > room) continue;
    if (fastest == nullptr || candidate.seconds < fastest->seconds) fastest = &candidate;
  }
  if (fastest == nullptr) {
    return {smallest->degrees, cat("needs least: ", in_words(smallest->memory), " of ", in_words(room),
                                   " that may be used before activations are known")};
  }
  return {fastest->degrees, cat("estimated to be fastest of what fits: ", in_words(fastest->memory), " of ",
                                in_words(room), " that may be used before activations are known")};
}

}  // namespace tesserae::dial
