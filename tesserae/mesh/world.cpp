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
  world.launcher_rank_.resize(launch.size);
  std::iota(world.launcher_rank_.begin(), world.launcher_rank_.end(), 0);
  world.host_.resize(launch.size);
  for (int rank = 0; rank < launch.size; ++rank) world.host_[rank] = rank / launch.local_size;
  world.hosts_ = world.host_.back() + 1;
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
  world.host_.assign(size, 0);
  world.launcher_rank_.resize(size);
  std::iota(world.launcher_rank_.begin(), world.launcher_rank_.end(), 0);
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
  world.hosts_ = static_cast<int>(number.size());
  world.launcher_rank_.resize(host_of.size());
  std::iota(world.launcher_rank_.begin(), world.launcher_rank_.end(), 0);
  std::ranges::stable_sort(world.launcher_rank_, {}, [&](int32_t launched) { return host_of_launched[launched]; });
  world.host_.reserve(host_of.size());
  for (const int32_t launched : world.launcher_rank_) world.host_.push_back(host_of_launched[launched]);
  const auto self = std::ranges::find(world.launcher_rank_, launch_.rank);
  world.rank_ = static_cast<int>(self - world.launcher_rank_.begin());
  return world;
}

std::vector<int> World::host_ranks(int rank) const {
  const auto [first, last] = std::ranges::equal_range(host_, host_[rank]);
  std::vector<int> ranks(last - first);
  std::iota(ranks.begin(), ranks.end(), static_cast<int>(first - host_.begin()));
  return ranks;
}

}  // namespace tesserae::mesh
