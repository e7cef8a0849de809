#include "tesserae/comm/link_log.h"

#include <algorithm>
#include <utility>

namespace tesserae::comm {
namespace {

thread_local std::string_view carrier;

}  // namespace

bool LinkUse::same_hop(const LinkUse& other) const {
  return ranks == other.ranks && verb == other.verb && lane == other.lane && link == other.link;
}

void LinkLog::add(std::string_view link, std::string_view lane, std::string_view verb, int ranks, uint64_t bytes,
                  double seconds) {
  const std::scoped_lock lock(mutex_);
  auto use = std::ranges::find_if(uses_, [&](const LinkUse& each) {
    return each.ranks == ranks && each.verb == verb && each.lane == lane && each.link == link;
  });
  if (use == uses_.end()) {
    use = uses_.insert(
        use, {.link = std::string(link), .lane = std::string(lane), .verb = std::string(verb), .ranks = ranks});
  }
  ++use->calls;
  use->bytes += bytes;
  use->seconds += seconds;
  if (seconds > 0) use->quickest = std::max(use->quickest, static_cast<double>(bytes) / seconds);
}

std::vector<LinkUse> LinkLog::take() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(uses_, {});
}

LinkLog& LinkLog::of_process() {
  static auto* const log = new LinkLog;  // lanes may outlive what is destroyed at the end of a process
  return *log;
}

void carried_by(std::string_view link) {
  carrier = link;
}

std::string_view take_carrier() {
  return std::exchange(carrier, {});
}

}  // namespace tesserae::comm
