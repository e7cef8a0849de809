#include "tesserae/comm/group_table.h"

#include <algorithm>
#include <set>

#include "tesserae/comm/transports/null.h"

namespace tesserae::comm {

std::string_view traffic_name(Traffic traffic) {
  switch (traffic) {
    case Traffic::gather:
      return "gather";
    case Traffic::reduce:
      return "reduce";
    case Traffic::control:
      return "control";
    case Traffic::copies:
      return "copies";
  }
  return "?";
}

namespace {

// "gather.0-1-2-3", or "gather.0-1-...-1023" where many ranks follow each other at equal distances. Different groups
// have different names.
std::string group_name(const std::vector<int>& members, Traffic traffic) {
  constexpr size_t many = 8;
  const auto distance_after = [&members](size_t i) { return members[i + 1] - members[i]; };
  bool even = members.size() > many;
  for (size_t i = 1; even && i + 1 < members.size(); ++i) even = distance_after(i) == distance_after(0);
  if (even) return cat(traffic_name(traffic), ".", members[0], "-", members[1], "-...-", members.back());
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

bool GroupTable::Before::operator()(const Key& a, const Key& b) const {
  if (a.first != b.first) return a.first < b.first;
  return std::ranges::lexicographical_compare(a.second, b.second);
}

Group& GroupTable::group(const std::vector<int>& members, Traffic traffic, const Make& make) {
  {
    std::lock_guard lock(mutex_);
    if (const auto found = groups_.find({traffic, members}); found != groups_.end()) {
      found->second.kept = found->second.kept || !borrowing_;
      return *found->second.group;
    }
  }
  const int index = index_among(members, rank_, size_);
  std::string name = group_name(members, traffic);
  // What was told through a store under the name of an earlier one is not for this one.
  if (const auto before = ended_.find(name); before != ended_.end()) name += cat('~', before->second + 1);
  // A group of one never reaches its transport: the verbs return before.
  auto made = members.size() == 1 ? std::make_unique<NullGroup>(std::move(name), members, index)
                                  : make(std::move(name), members, index);
  std::lock_guard lock(mutex_);
  const Key key(traffic, made->members());
  Entry entry{std::move(made), std::make_shared<int>(), !borrowing_};
  return *groups_.emplace(key, std::move(entry)).first->second.group;
}

std::shared_ptr<Group> GroupTable::borrow(const std::function<Group&()>& ask) {
  Group* group = nullptr;
  borrowing_ = true;
  try {
    group = &ask();
  } catch (...) {
    borrowing_ = false;
    throw;
  }
  borrowing_ = false;
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(groups_, [&](const auto& each) { return each.second.group.get() == group; });
  return {found->second.holders, group};
}

std::vector<Group*> GroupTable::unused(const std::vector<int>& within) const {
  const std::set<int> ranks(within.begin(), within.end());
  std::lock_guard lock(mutex_);
  std::vector<Group*> found;
  for (const auto& [key, entry] : groups_) {
    const bool inside = std::ranges::all_of(key.second, [&](int member) { return ranks.contains(member); });
    if (!entry.kept && entry.holders.use_count() == 1 && inside) found.push_back(entry.group.get());
  }
  return found;
}

void GroupTable::end(Group& group) {
  group.close();
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(groups_, [&](const auto& each) { return each.second.group.get() == &group; });
  const std::string& name = group.name();
  ++ended_[name.substr(0, name.find('~'))];
  of_ended_ += group.counters();
  const std::unique_ptr<Group> last = std::move(found->second.group);  // the key lies in it
  groups_.erase(found);
}

int GroupTable::size() const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(groups_.size());
}

Lane& GroupTable::lane(Traffic traffic) {
  auto& lane = lanes_[static_cast<size_t>(traffic)];
  if (!lane) lane = std::make_unique<Lane>(std::string(traffic_name(traffic)), kind_, device_);
  return *lane;
}

Counters GroupTable::counters() const {
  std::lock_guard lock(mutex_);
  Counters sum = of_ended_;
  for (const auto& [key, entry] : groups_) sum += entry.group->counters();
  return sum;
}

void GroupTable::drain() {
  for (auto& lane : lanes_) {
    if (lane) lane->drain();
  }
}

void GroupTable::clear() {
  for (auto& lane : lanes_) lane.reset();
  std::lock_guard lock(mutex_);
  groups_.clear();
}

}  // namespace tesserae::comm
