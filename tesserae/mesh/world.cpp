#include "tesserae/mesh/world.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <unordered_map>

#include "tesserae/base/error.h"

namespace tesserae::mesh {

World World::from_environment() {
  return from_environment([](const char* name) { return std::getenv(name); });
}

World World::from_environment(const Lookup& lookup) {
  World world;
  world.launch_ = read_launch(lookup);
  const Launch& launch = world.launch_;
  world.rank_ = launch.rank;
  for (int rank = 0; rank < launch.size; rank += launch.local_size) world.first_rank_.push_back(rank);
  return world;
}

World World::single_host(int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidArgument("World::single_host", cat("rank ", rank, " of ", size, ": the rank must be in [0, size)"));
  }
  World world;
  world.launch_.launcher = "single";
  world.launch_.rank = world.launch_.local_rank = world.rank_ = rank;
  world.launch_.size = world.launch_.local_size = size;
  world.first_rank_ = {0};
  return world;
}

World World::joined(int rank, int size, bool served) {
  World world = single_host(rank, size);
  world.launch_.launcher = "joined";
  world.launch_.store_is_served = served;
  return world;
}

World World::with_hosts(const std::vector<std::string>& host_of) const {
  if (static_cast<int>(host_of.size()) != size()) {
    throw InvalidArgument("World::with_hosts", cat(host_of.size(), " host labels for ", size(), " ranks"));
  }
  // Hosts are numbered as their first launcher rank appears, which is the order of their lowest launcher rank.
  std::unordered_map<std::string, int32_t> number;
  std::vector<int32_t> host_of_launched(host_of.size());
  for (size_t i = 0; i < host_of.size(); ++i) {
    host_of_launched[i] = number.try_emplace(host_of[i], static_cast<int32_t>(number.size())).first->second;
  }
  World world;
  world.launch_ = launch_;
  std::vector<int32_t> launched(host_of.size());
  std::iota(launched.begin(), launched.end(), 0);
  std::ranges::stable_sort(launched, {}, [&](int32_t rank) { return host_of_launched[static_cast<size_t>(rank)]; });
  for (size_t rank = 0; rank < launched.size(); ++rank) {
    const auto host = static_cast<size_t>(host_of_launched[static_cast<size_t>(launched[rank])]);
    if (host == world.first_rank_.size()) world.first_rank_.push_back(static_cast<int32_t>(rank));
  }
  world.rank_ = static_cast<int>(std::ranges::find(launched, launch_.rank) - launched.begin());
  if (!std::ranges::is_sorted(launched)) world.launcher_rank_ = std::move(launched);
  return world;
}

int World::host(int rank) const {
  return static_cast<int>(std::ranges::upper_bound(first_rank_, rank) - first_rank_.begin()) - 1;
}

std::vector<int> World::host_ranks(int rank) const {
  const auto host = static_cast<size_t>(this->host(rank));
  const int end = host + 1 < first_rank_.size() ? first_rank_[host + 1] : size();
  std::vector<int> ranks(static_cast<size_t>(end - first_rank_[host]));
  std::iota(ranks.begin(), ranks.end(), first_rank_[host]);
  return ranks;
}

World world_of(const World& job, const std::vector<int>& members) {
  const bool distinct = std::ranges::adjacent_find(members, std::greater_equal<>()) == members.end();
  if (members.empty() || !distinct || members.front() < 0 || members.back() >= job.size()) {
    throw InvalidArgument("world_of", cat("members must be ranks of a job of ", job.size(), " in ascending order"));
  }
  const auto self = std::ranges::find(members, job.rank());
  if (self == members.end()) {
    throw InvalidArgument("world_of", cat("rank ", job.rank(), " is not among the ", members.size(), " members"));
  }
  std::vector<std::string> hosts;
  for (const int member : members) hosts.push_back(cat(job.host(member)));
  // Ranks are ordered by host in the job already, so they keep their order here.
  return World::joined(static_cast<int>(self - members.begin()), static_cast<int>(members.size()), /*served=*/true)
      .with_hosts(hosts);
}

}  // namespace tesserae::mesh
