#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace tesserae::comm {

/// What verbs of one kind have sent over one kind of link: a hop.
struct LinkUse {
  std::string link;     ///< "shared memory", "tcp", "device", "threads"
  std::string lane;     ///< of the groups: traffic_name()
  std::string verb;     ///< all_gather, ...
  int ranks = 0;        ///< members of the groups
  uint64_t calls = 0;   ///< of which bytes left this rank
  uint64_t bytes = 0;   ///< that did
  double seconds = 0;   ///< of these calls, with what they waited for others; 0: not known (a device)
  double quickest = 0;  ///< bytes a second of its quickest call: the one that waited least

  bool same_hop(const LinkUse& other) const;
};

/// What the groups of a process send, by hop. A verb counts where its bytes travel: one on two levels as the verbs of
/// the two groups that it is made of. Ranks that are threads of one process (run_local) are one. Thread-safe; grows
/// with the number of hops, not of verbs.
class LinkLog {
 public:
  /// One call more.
  void add(std::string_view link, std::string_view lane, std::string_view verb, int ranks, uint64_t bytes,
           double seconds);
  /// What has come since the last call of this function, in the order of first use.
  std::vector<LinkUse> take();

  /// This process's, in which all groups write.
  static LinkLog& of_process();

 private:
  std::mutex mutex_;
  std::vector<LinkUse> uses_;
};

/// From a transport, in a verb: that kind of link, a name of static life, carries it.
void carried_by(std::string_view link);
/// Once: what the verb that this thread has just run was carried by; empty: other groups, or nothing.
std::string_view take_carrier();

}  // namespace tesserae::comm
