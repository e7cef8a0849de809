#pragma once

#include <chrono>
#include <functional>

#include "tesserae/launch/launcher.h"

namespace tesserae::launch {

/// The last resort where ranks of a job cannot go on: all of them begin again, after a pause that doubles from try to
/// try. One that lasted longer than the longest pause begins with the first pause anew.
struct Restarts {
  int most = 0;  ///< how often
  std::chrono::milliseconds first_pause{1000}, longest_pause{60'000};
  /// Changes what the ranks of the next try run.
  std::function<void(LocalJob&, const JobEnd&)> prepare = {};
};

/// run_job() until the job ends otherwise than by a rank's failure, so often at most; what the same error has ended
/// twice in a row would fail again, and is not begun anew. Ranks have TORCHELASTIC_RESTART_COUNT in their environment,
/// as under torchrun. With restarts the job has one host: InvalidArgument. Returns the exit status of the last try; if
/// a signal ends the pause before the next, early_exit_code or, if there is none, 128 + signal.
int run_with_restarts(LocalJob job, const Restarts& restarts);

}  // namespace tesserae::launch
