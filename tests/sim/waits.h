#pragma once

#include <string>
#include <vector>

namespace tesserae::sim {

/// [Note: negative controls] Whether a missing wait would be noticed is tried by leaving waits out, one at a time. All
/// that orders the work of a device passes through the simulator, so that is where a wait is left out: the engine under
/// test is the one that ships. Which line of the engine a call comes from is read off the stack (wait_sites.h).
///
/// `without_waits` (without_waits.cpp) does it for every line, each in a process of its own.
enum class Wait {
  record,       ///< an event is recorded; left out: it shows what it showed before
  block,        ///< a stream waits for an event
  query,        ///< is an event done, and with it what was kept until then? left out: it is
  synchronize,  ///< the host waits for a stream or an event
  work,         ///< a stream waits for messages of a group
  copy,         ///< the host waits for a copy to its memory
};
const char* to_string(Wait wait);

/// A call, by where it will return to, and its callers', innermost first: those within this program.
struct WaitCall {
  Wait wait;
  std::vector<void*> stack;
  auto operator<=>(const WaitCall&) const = default;
};

/// From now on all different calls are kept. Once, before other threads run.
void watch_waits();
std::vector<WaitCall> watched_waits();

/// From now on calls of `wait` are left out whose stack begins with one of `through`, any number of times, and goes on
/// with one of `at`. Once, before other threads run.
void leave_out(Wait wait, std::vector<void*> through, std::vector<void*> at);

/// Asked by the simulator before each: is this one to be left out? Any thread.
bool left_out(Wait wait);

}  // namespace tesserae::sim
