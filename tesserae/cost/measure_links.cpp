#include "tesserae/cost/measure_links.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>

#include "tesserae/comm/agree.h"
#include "tesserae/cost/fabric_facts.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/memory.h"

namespace tesserae::cost {
namespace {

constexpr int64_t gathered_bytes = 4 << 20;
constexpr int64_t copied_bytes = 8 << 20;
constexpr int repeats = 3;
constexpr int pairs_of_barriers = 40;

at::Tensor bytes_on(const comm::Fabric& fabric, int64_t bytes) {
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(fabric.device()));
}

/// The best of some runs: what disturbed the others is no property of the link. The first one only warms up.
template <class Body>
double best_seconds(const at::Tensor& tensor, const Body& body, int runs = repeats) {
  double best = 1e9;
  for (int i = 0; i <= runs; ++i) {
    const os::TimePoint begin = os::now();
    body();
    if (!tensor.is_cpu()) tensor.narrow(0, 0, 1).cpu();  // waits for the device
    if (i > 0) best = std::min(best, std::chrono::duration<double>(os::now() - begin).count());
  }
  return std::max(best, 1e-9);
}

struct Measured {
  double bandwidth, latency;
};

/// Of one collective. Of two in a row, since the last rank to come to one waits for nobody; and the best of many, since
/// where ranks share processors they mostly wait for a turn, ten times as long, which is no property of the link.
double latency_of(comm::Group& group, const at::Tensor& buffer) {
  const auto twice = [&group] {
    group.barrier();
    group.barrier();
  };
  return best_seconds(buffer, twice, pairs_of_barriers) / 2;
}

/// `hosts`: over which the group goes in two levels; 1: it goes flat.
Measured measure(comm::Fabric& fabric, comm::Group& group, int hosts = 1) {
  const int64_t piece = gathered_bytes / group.size();
  const at::Tensor buffer = bytes_on(fabric, piece * group.size());
  const double seconds = best_seconds(buffer, [&] { group.all_gather(buffer); });
  const int64_t sent = piece * (hosts > 1 ? hosts - 1 : group.size() - 1);
  return {.bandwidth = static_cast<double>(sent) / seconds, .latency = latency_of(group, buffer)};
}

/// Bytes a second that are read and written while a tensor is copied.
double memory_bandwidth(const comm::Fabric& fabric) {
  const at::Tensor from = bytes_on(fabric, copied_bytes), to = bytes_on(fabric, copied_bytes);
  return 2.0 * copied_bytes / best_seconds(to, [&] { to.copy_(from); });
}

}  // namespace

Links measure_links(comm::Fabric& fabric) {
  Links links;
  const mesh::World& world = fabric.world();
  const auto slowest = [&fabric](double own) { return 1 / comm::max_over_ranks(fabric, 1 / own); };
  if (fabric.size() > 1) {
    Facts facts = facts_of(fabric);
    facts.shared_copy = world.hosts() > 1 && ranks_can_share(fabric);
    const Measured all = measure(fabric, fabric.everyone(), goes_in_two_levels(facts) ? world.hosts() : 1);
    links.between = slowest(all.bandwidth);
    links.between_latency = comm::max_over_ranks(fabric, all.latency);
    links.inside = links.between;
    links.inside_latency = links.between_latency;
    if (world.hosts() > 1) {
      // A rank that is alone on its host has no such link; hosts with others tell.
      const std::vector<int> neighbours = world.host_ranks(fabric.rank());
      Measured own{.bandwidth = 1e12, .latency = 0};
      if (neighbours.size() > 1) own = measure(fabric, fabric.group(neighbours, comm::Traffic::control));
      links.inside = slowest(own.bandwidth);
      links.inside_latency = comm::max_over_ranks(fabric, own.latency);
    }
  }
  links.memory = slowest(memory_bandwidth(fabric));
  os::give_back_freed_memory();  // a small model's steps would never use what these buffers took
  return links;
}

}  // namespace tesserae::cost
