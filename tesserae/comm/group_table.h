#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/comm/fabric.h"

namespace tesserae::comm {

/// The groups and lanes of one fabric: each made at its first use and kept until the fabric ends, but for groups that
/// were only borrowed.
class GroupTable {
 public:
  using Make = std::function<std::unique_ptr<Group>(std::string name, const std::vector<int>& members, int rank)>;

  /// `rank`: this process's job rank; `size`: ranks in the job.
  GroupTable(int rank, int size, Lane::Kind kind, c10::Device device)
      : rank_(rank), size_(size), kind_(kind), device_(device) {}

  /// Throws InvalidArgument if `members` are not distinct ranks of the job or this rank is not among them.
  Group& group(const std::vector<int>& members, Traffic traffic, const Make& make);
  /// `ask` calls group() once: what it gets is not kept for that.
  std::shared_ptr<Group> borrow(const std::function<Group&()>& ask);
  /// The borrowed groups within these job ranks that nobody holds. All ranks have those that they share in one order.
  std::vector<Group*> unused(const std::vector<int>& within) const;
  void end(Group& group);
  int size() const;
  Lane& lane(Traffic traffic);
  Counters counters() const;
  /// Waits for all that was submitted to the lanes; what failed is of no interest.
  void drain();
  /// Ends the lanes (finishing what was submitted), then the groups.
  void clear();

 private:
  // By traffic and members, which lie in the group: a list of all ranks of a large job is not kept twice.
  using Key = std::pair<Traffic, std::span<const int>>;
  struct Before {
    bool operator()(const Key& a, const Key& b) const;
  };

  struct Entry {
    std::unique_ptr<Group> group;
    std::shared_ptr<void> holders;  // shared by all who borrowed it
    bool kept = false;
  };

  int rank_;
  int size_;
  Lane::Kind kind_;
  c10::Device device_;
  mutable std::mutex mutex_;  // counters() may be asked from another thread, for a progress line
  std::map<Key, Entry, Before> groups_;
  std::map<std::string, int> ended_;  // by name: how many of it
  Counters of_ended_;
  bool borrowing_ = false;
  std::array<std::unique_ptr<Lane>, all_traffic.size()> lanes_;
};

std::string_view traffic_name(Traffic traffic);

}  // namespace tesserae::comm
