#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/process.h"

namespace tesserae::launch {

/// Processes that become ranks as soon as they are told their environment: copies of this one, made while it has no
/// other thread, which is before the job's store is served. What this process has loaded they need not load again (with
/// libtorch a quarter of a second of processor time each), and share. Those that were not called are killed with it.
class WaitingRanks {
 public:
  struct Rank {
    os::Process process;
    os::Descriptor output;  ///< what it writes to standard error, and but for the first to standard output
  };

  /// `body` is what a rank does, and returns its exit status. Where this process has other threads by now there are
  /// none. Throws IoError.
  WaitingRanks(int count, const std::function<int()>& body);

  /// The next one has these variables, beside this process's own, and begins. Nothing: there is none left.
  std::optional<Rank> call(const std::map<std::string, std::string>& environment);

 private:
  struct Waiting {
    Rank rank;
    os::Pipe orders;  // its reading end, too: writing to one that was killed is no broken pipe
  };
  std::deque<Waiting> waiting_;
};

}  // namespace tesserae::launch
