#pragma once

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

namespace tesserae::checkpoint {

/// Named places of the writer, of a change of the mesh (handover.h, train/sharing_out.cpp) and of a run's beginning
/// (train/services.cpp), at which a test may end the process. One load of an atomic pointer where no test is; where
/// TESSERAE_CRASH_POINTS is off, as in all that ships, nothing, and of what follows nothing else is defined.
///
/// A program that knows nothing of tests is reached through the environment: TESSERAE_CRASH_AT=NAME[@RANK][#COUNT] ends
/// the process (SIGKILL) when that rank passes that point for the COUNT-th time (first time, any rank if left out).
void crash_point(const char* name, int rank);

/// All names of a save, in the order in which it passes them.
const std::vector<std::string>& crash_point_names();

/// Called at every point from now on, from whatever thread passes it; nullptr: nobody is.
using CrashHook = void (*)(std::string_view name, int rank);
void set_crash_hook(CrashHook hook);

}  // namespace tesserae::checkpoint
