#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/os/clock.h"

namespace tesserae::os {

/// A program to start.
struct Command {
  std::vector<std::string> arguments = {};              ///< the first one names the program, looked up in PATH
  std::map<std::string, std::string> environment = {};  ///< added to this process's own, replacing equal names
  /// The kernel kills the child (SIGKILL) when the thread that spawned it ends, even if this process is killed itself.
  bool die_with_parent = false;
  bool new_group = false;  ///< leads a process group of its own: a terminal's Ctrl-C does not reach it
  int output = -1;         ///< descriptor that becomes its standard output; -1: as ours
  int errors = -1;         ///< descriptor that becomes its standard error; -1: as ours
  int kept = -1;           ///< descriptor that it has under the same number, beside the first three; -1: none
};

/// How a process ended.
struct Exit {
  int code = 0;    ///< what it returned, if it was not killed
  int signal = 0;  ///< the signal that killed it, or 0

  bool success() const { return code == 0 && signal == 0; }
  std::string text() const;  ///< "exited with code 2" or "killed by signal 9 (Killed)"
};

/// A child process. Move-only; used from one thread. Destroying it kills a child that still runs, and reaps it: no
/// child outlives its owner, no zombie stays behind. Until then its id is not given to another process. Needs SIGCHLD
/// not to be ignored (keep_ended_children), or nobody knows how it ended.
class Process {
 public:
  /// Throws IoError naming the program if it cannot be started.
  static Process spawn(const Command& command);
  /// A copy of this process in place of a program, which calls `body` and exits with what that returns: whatever has
  /// been loaded by now is there at once, in memory that both share until one writes to it. It has of this process's
  /// descriptors what a program would have. Of `command`, arguments and environment say nothing. It ends
  /// without exit handlers and destructors of static objects; what it has written to C's streams is written out.
  /// Nothing, and no copy: this process has other threads, whose locks it would find held for ever.
  static std::optional<Process> copy(const Command& command, const std::function<int()>& body);
  /// One that a child of ours made for us, and that came to us since its parent ended (Orphans): ours from now on.
  static Process adopt(pid_t id) { return Process(id); }

  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;

  pid_t id() const { return id_; }
  /// How it ended, or nothing if it still runs. Never blocks.
  std::optional<Exit> poll();
  /// Waits for its end, at most until the deadline.
  std::optional<Exit> wait(const Deadline& deadline);
  /// Sends a signal; one that ended is left alone.
  void signal(int number);
  /// Sends a signal to the process group that it leads (new_group), those of its children that outlived it included.
  void signal_group(int number);

 private:
  explicit Process(pid_t id) : id_(id) {}
  void end() noexcept;

  pid_t id_ = -1;
  std::optional<Exit> exit_;
};

/// While it is there, processes whose parent ends are children of this process instead of the system's first, if they
/// descend from it.
class Orphans {
 public:
  /// Throws IoError.
  Orphans();
  ~Orphans();
  Orphans(const Orphans&) = delete;
  Orphans& operator=(const Orphans&) = delete;
};

pid_t process_id();
/// What `ps` and `top` call this process, up to 15 bytes; and its threads from now on.
void name_process(const std::string& name);
pid_t parent_id();

/// When a process started, in clock ticks since boot: with its id, names it for good though ids are used again.
/// Nothing: there is no such process, or it is a zombie.
std::optional<uint64_t> start_time(pid_t process);

/// How long this process has been there, to a hundredth of a second.
std::chrono::nanoseconds process_age();

/// For how long the calling thread has had a processor since it began.
std::chrono::nanoseconds thread_time();

}  // namespace tesserae::os
