#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tesserae/os/fork.h"

namespace tesserae::comm {

class CallLog;

/// The end of a task submitted to a lane. Cheap to copy; default-constructed: already done.
class Ticket {
 public:
  Ticket() = default;
  /// Makes the caller's next work come after the task: blocks the host (CPU lanes) or the current stream (device
  /// lanes). Rethrows what the task threw, every time it is called.
  void wait() const;
  /// True if wait() would not block the host.
  bool ready() const;
  /// The device whose current stream wait() makes wait; none: it blocks the host, or nothing.
  std::optional<c10::Device> device() const;
  /// Whether both are of one task.
  bool operator==(const Ticket&) const = default;

  struct State;

 private:
  friend class Lane;
  explicit Ticket(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// Runs communication tasks in the order in which they were submitted, beside the thread that computes.
///
/// Three kinds, chosen by what the transport needs; callers see no difference:
///  - threaded: transports that block the host (Gloo, local). One thread runs the tasks, and queues what is for a
///              device on the caller's current stream.
///  - stream:   devices with streams. The task is queued at once on the lane's own stream, ordered after what is on the
///              caller's current stream; events order the rest. The host never blocks. What a task captured lives until
///              the device has done it, or that stream waits for its ticket.
///  - immediate: the task runs inside submit() (null, single process).
class Lane {
 public:
  enum class Kind { threaded, stream, immediate };

  Lane(std::string name, Kind kind, c10::Device device);
  ~Lane();  ///< finishes what was submitted
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Thread-safe. After a task threw, later tasks are not run and their tickets rethrow the first error. Throws
  /// ForkedChild.
  Ticket submit(std::function<void()> task);

  /// Waits (on the host) for everything submitted so far, without throwing.
  void drain();

  /// Tasks that are submitted from now on tell `log` of the verbs that they call; null: nobody. From one thread.
  void log_calls(std::shared_ptr<CallLog> log) { log_ = std::move(log); }

  Kind kind() const { return kind_; }

 private:
  struct Impl;
  struct Immediate;
  struct Threaded;
  struct Streamed;
  Kind kind_;
  os::ForkGuard made_;
  std::shared_ptr<CallLog> log_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tesserae::comm
