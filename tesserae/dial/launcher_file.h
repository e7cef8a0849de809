#pragma once

#include "tesserae/os/files.h"
#include "tesserae/os/process.h"

namespace tesserae::dial {

// Who listens in a run folder may be gone while its job goes on: rank 0 is being replaced, or the ranks meet again. The
// job is there as long as its launcher is, so `launcher.json` says which process that is. Only of a launcher that goes
// on after losses; any other job has no such file, and ends with its rank 0.

/// Says so of this process's launcher, if it is ours. What cannot be written is a warning: nobody will wait then.
void note_launcher(const os::Path& folder);
/// The same of that process of this host. Throws IoError.
void note_launcher(const os::Path& folder, pid_t launcher);

/// Whether the launcher of the run in `folder` is a living process of this host. False where nothing says so.
bool launcher_lives(const os::Path& folder);

}  // namespace tesserae::dial
