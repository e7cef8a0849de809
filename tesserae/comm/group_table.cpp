#include "tesserae/comm/group_table.h"

#include <algorithm>

#include "tesserae/comm/null.h"

namespace tesserae::comm {

std::string_view traffic_name(Traffic traffic) {
  switch (traffic) {
    case Traffic::gather:
      return "gather";
    case Traffic::reduce:
      return "reduce";
    case Traffic::control:
      return "control";
  }
  return "?";
}

namespace {

std::string group_name(const std::vector<int>& members, Traffic traffic) {
  std::string name(traffic_name(traffic));
  for (size_t i = 0; i < members.size(); ++i) name += (i == 0 ? '.' : '-') + std::to_string(members[i]);
  return name;
}

int index_among(const std::vector<int>& members, int rank, int size) {
  std::vector<int> sorted = members;
  std::sort(sorted.begin(), sorted.end());
  const bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  if (sorted.empty() || !distinct || sorted.front() < 0 || sorted.back() >= size) {
    throw InvalidArgument("Fabric::group", cat("members must be distinct ranks of a job of ", size, " ranks"));
  }
  const auto found = std::find(members.begin(), members.end(), rank);
  if (found == members.end()) {
    throw InvalidArgument("Fabric::group", cat("rank ", rank, " asked for a group that it is no member of"));
  }
  return static_cast<int>(found - members.begin());
}

}  // namespace

Group& GroupTable::group(const std::vector<int>& members, Traffic traffic, const Make& make) {
  const auto key = std::make_pair(traffic, members);
  {
    std::lock_guard lock(mutex_);
    if (const auto found = groups_.find(key); found != groups_.end()) return *found->second;
  }
  const int index = index_among(members, rank_, size_);
  std::string name = group_name(members, traffic);
  // A group of one never reaches its transport: the verbs return before.
  auto made = members.size() == 1 ? std::make_unique<NullGroup>(std::move(name), members, index)
                                  : make(std::move(name), members, index);
  std::lock_guard lock(mutex_);
  return *(groups_[key] = std::move(made));
}

Lane& GroupTable::lane(Traffic traffic) {
  auto& lane = lanes_[static_cast<int>(traffic)];
  if (!lane) lane = std::make_unique<Lane>(std::string(traffic_name(traffic)), kind_, device_);
  return *lane;
}

Counters GroupTable::counters() const {
  std::lock_guard lock(mutex_);
  Counters sum;
  for (const auto& [key, group] : groups_) sum += group->counters();
  return sum;
}

void GroupTable::clear() {
  for (auto& lane : lanes_) lane.reset();
  std::lock_guard lock(mutex_);
  groups_.clear();
}

}  // namespace tesserae::comm
