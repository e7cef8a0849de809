#pragma once

#include <c10/core/Event.h>

#include <deque>
#include <optional>
#include <vector>

#include "tesserae/comm/lane.h"

namespace tesserae::shard {

/// How long somebody stood still until communication had ended. On the host that is what waiting took. On a device the
/// host waits for nothing, and the compute stream does: two events around its wait say how long, and are read when both
/// are over, by whoever comes later. Nobody waits for them.
class ExposedTime {
 public:
  /// Ticket::wait(), and counts.
  void wait(const comm::Ticket& ticket);
  /// So far; on a device, of the waits that are over.
  double seconds();

 private:
  struct Wait {
    c10::Event begin, end;
  };
  void collect();
  Wait next(c10::DeviceType type);

  double seconds_ = 0;
  comm::Ticket last_;                   // on a device, what was waited for last ...
  std::optional<c10::Stream> last_by_;  // ... by which stream: once is enough for all buffers of a unit
  std::deque<Wait> running_;            // in their order on the stream
  std::vector<Wait> free_;              // events cost more to make than to record
};

}  // namespace tesserae::shard
