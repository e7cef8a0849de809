#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/comm/liveness/verdict.h"

namespace tesserae::comm {

/// A group as the liveness channel sees it. All functions are called from the channel's thread.
class Watched {
 public:
  struct Pending {
    uint64_t sequence = 0;  ///< counts the group's collectives; 0: an operation that only some members run
    std::string text;       ///< what members must agree on: "all_gather of 1024 x Float"
    std::chrono::steady_clock::time_point since;
    std::vector<int> peers = {};  ///< job ranks for which an operation that only some members run waits; may be unknown
  };

  virtual ~Watched() = default;
  virtual const std::string& watched_name() const = 0;
  virtual const std::vector<int>& watched_members() const = 0;
  virtual std::chrono::milliseconds watched_deadline() const = 0;
  /// The operation that blocks its caller now, if any.
  virtual std::optional<Pending> pending() const = 0;
  /// True if a member's end breaks what an operation waits on (sockets). False (shared memory): only the channel can
  /// tell that a member has left.
  virtual bool notices_departures() const { return true; }
  /// Makes the pending operation look whether its connections still stand.
  virtual void check_connections() {}
  /// Makes the pending operation (or the next one) fail with this verdict.
  virtual void abort(const Verdict& verdict) = 0;
};

}  // namespace tesserae::comm
