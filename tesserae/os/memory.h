#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace tesserae::os {

/// What a process uses, in bytes.
struct ProcessMemory {
  uint64_t resident = 0;       ///< pages in memory, shared ones in full
  uint64_t proportional = 0;   ///< shared pages divided by the number of processes that share them: sums up over ranks
  uint64_t peak_resident = 0;  ///< the most that resident ever was
  uint64_t of_files = 0;       ///< of proportional: libraries. Other processes that map them, or end, change it
};

/// Of `process`, by default this one. Throws IoError if there is no such process or it belongs to another user.
/// Walks the page tables (milliseconds for each GB): once a step is too often for big processes.
ProcessMemory process_memory(pid_t process = 0);

/// The most that was ever resident in this process, in bytes. Cheap.
uint64_t peak_resident();

/// How many pages this process has waited for until they were read from a disk: of mapped files that memory did not
/// hold, or no longer. Cheap.
uint64_t major_faults();

/// Resident memory of this process, in bytes: now, and the most since the last call (the first time: since the process
/// began). Cheap enough for every step. It makes the system forget the peak: peak_resident() and process_memory() of
/// this process still know it, programs outside (/usr/bin/time) do not. Where the system refuses, `peak` is that of all
/// time.
struct RecentMemory {
  uint64_t resident = 0;
  uint64_t peak = 0;
};
RecentMemory recent_memory();

/// Gives back to the system what was freed here and is kept for later by the C library (where it can be told to). Walks
/// the heap: milliseconds for each GB. From any thread.
void give_back_freed_memory();

/// Lets the C library keep freed blocks of up to 32 MB for the next step, which would else go back to the system and
/// come again, cleared page by page, in every step (4 % of a step of 34 M parameters). For programs, at their begin: it
/// is the process's, and memory that one phase needed stays resident in the next. Does nothing where the environment
/// sets MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES.
void keep_freed_memory();

/// What this host has, in bytes, within the limits of the control groups (v1 or v2) that this process is in: those of a
/// container, of a job of Slurm. Pages of files count as available there, too.
struct HostMemory {
  uint64_t total = 0;
  uint64_t available = 0;  ///< could be allocated without swapping
};
HostMemory host_memory();

/// The least limit of the control groups (v1 or v2) that this process is in, in bytes; nothing if none limits it.
std::optional<int64_t> group_memory_limit();

}  // namespace tesserae::os
