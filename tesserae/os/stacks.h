#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace tesserae::os {

/// Where a thread of this process is.
struct ThreadStack {
  pid_t id = 0;                     ///< the system's
  std::string name;                 ///< at most 15 characters; threads without one have the program's
  std::string state;                ///< "running", "sleeping in futex_do_wait": what it did when it was asked
  std::vector<std::string> frames;  ///< the innermost first, at most 128: names_of_code() (symbols.h)
  std::string note;                 ///< why there are no frames; empty if there are
};

/// The stacks of all threads of this process, the caller's too, by id. For a process that hangs: also while threads
/// wait in locks, collectives or futexes, loop for ever, hang within dlopen or hold Python's GIL. Not while one is
/// stuck in the allocator, which this needs too.
///
/// Each thread is interrupted by a real-time signal, whose handler writes down the thread's own frames. Nobody is
/// stopped: the stacks are of about the same moment, not of one. A thread that has not answered within `patience`, or
/// blocks the signal, has a note in place of frames; one that began or ended meanwhile may be missing.
///
/// The signal is the first from SIGRTMAX down that has no handler. It is taken at the first call and kept; if somebody
/// puts a handler in the place of this one, another signal is taken. Throws IoError if none is left, or if the threads
/// cannot be listed.
///
/// What a thread pays: system calls are restarted (SA_RESTART) but for those that never are (poll, epoll_wait,
/// nanosleep, io_uring_enter; see signal(7)), which end early with EINTR. This project's own cope with that.
///
/// Costs 4 ms with 20 threads and 8 ms with 80, in a Python process with torch loaded.
///
/// Thread-safe: one call at a time, others wait for it. Works in a forked child, for the child's own threads.
std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds patience = std::chrono::seconds(1));

/// For people: for each thread a line of its id, name and state, then its frames, numbered, or its note; those of
/// threads that are at the same place (a pool's) once for all of them.
std::string to_text(const std::vector<ThreadStack>& stacks);

}  // namespace tesserae::os
