#include "tesserae/doctor/links.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "tesserae/comm/agree.h"
#include "tesserae/doctor/text.h"
#include "tesserae/os/limits.h"
#include "tesserae/os/seconds.h"

namespace tesserae::doctor {
namespace {

constexpr int barriers = 51;
constexpr int gathers = 5;
constexpr double much_apart = 1.0;  // seconds: where times in logs mislead

/// What this rank sees of its group.
Link measure(comm::Group& group, comm::Fabric& fabric, std::string name, int mebibytes) {
  Link link{.name = std::move(name), .ranks = group.size()};
  std::vector<double> times;
  for (int i = 0; i < barriers; ++i) {
    const os::TimePoint begin = os::now();
    group.barrier();
    times.push_back(os::seconds_since(begin));
  }
  std::nth_element(times.begin(), times.begin() + barriers / 2, times.end());
  link.microseconds = times[barriers / 2] * 1e6;
  const int64_t piece = std::max<int64_t>((int64_t{mebibytes} << 20) / group.size() / 4, 1);
  const at::Tensor buffer = at::zeros({piece * group.size()}, at::TensorOptions(at::kFloat).device(fabric.device()));
  double best = 0;
  for (int i = 0; i < gathers; ++i) {
    group.barrier();
    const os::TimePoint begin = os::now();
    group.all_gather(buffer);
    group.barrier();  // on a device: the bytes have arrived
    best = std::max(best, static_cast<double>(piece * 4 * (group.size() - 1)) / os::seconds_since(begin));
  }
  link.bytes_per_second = best;
  return link;
}

/// The slowest of all ranks' views.
Link slowest(const Link& mine, comm::Fabric& fabric) {
  Link all = mine;
  all.microseconds = comm::max_over_ranks(fabric, mine.microseconds);
  all.bytes_per_second = -comm::max_over_ranks(fabric, mine.ranks > 1 ? -mine.bytes_per_second : -HUGE_VAL);
  all.ranks = static_cast<int>(comm::max_over_ranks(fabric, mine.ranks));
  return all;
}

}  // namespace

LinkFacts measure_links(comm::Fabric& fabric, int mebibytes) {
  const mesh::World& world = fabric.world();
  LinkFacts facts{.hosts = world.hosts(), .ranks = fabric.size(), .links = {}};
  fabric.everyone().barrier();
  const std::vector<double> times = comm::from_all_ranks(fabric, os::time_of_day());
  facts.clocks_apart = *std::max_element(times.begin(), times.end()) - *std::min_element(times.begin(), times.end());

  const std::vector<int> neighbours = world.host_ranks(fabric.rank());
  const auto index = static_cast<size_t>(fabric.rank() - neighbours.front());
  bool all_hosts_alike = true;
  std::vector<int> across;  // the ranks of other hosts that have this one's place on theirs
  for (int rank = 0; rank < fabric.size(); rank += static_cast<int>(world.host_ranks(rank).size())) {
    all_hosts_alike = all_hosts_alike && world.host_ranks(rank).size() == neighbours.size();
    across.push_back(rank + static_cast<int>(index));
  }
  if (world.hosts() < fabric.size()) {
    comm::Group& group = fabric.group(neighbours, comm::Traffic::control);
    facts.links.push_back(slowest(measure(group, fabric, "within hosts", mebibytes), fabric));
  }
  if (world.hosts() > 1) {
    comm::Group& group = all_hosts_alike ? fabric.group(across, comm::Traffic::control) : fabric.everyone();
    facts.links.push_back(slowest(measure(group, fabric, "between hosts", mebibytes), fabric));
  }
  return facts;
}

Findings examine(const LinkFacts& facts) {
  Findings found = {
      {"ranks", Verdict::good, cat(counted(facts.ranks, "rank"), " on ", counted(facts.hosts, "host"), " met"), ""}};
  for (const Link& link : facts.links) {
    char text[96];
    std::snprintf(text, sizeof text, "%.2f GB/s into each of %d ranks together, a barrier in %.1f us",
                  link.bytes_per_second / 1e9, link.ranks, link.microseconds);
    found.push_back({link.name, Verdict::good, text, ""});
  }
  if (facts.hosts > 1) {
    char text[64];
    std::snprintf(text, sizeof text, "those of the hosts are up to %.3f s apart", facts.clocks_apart);
    const bool much = facts.clocks_apart > much_apart;
    found.push_back({"clocks", much ? Verdict::warning : Verdict::good, text,
                     much ? "run NTP on the hosts: times in their logs cannot be compared" : ""});
  }
  return found;
}

}  // namespace tesserae::doctor
