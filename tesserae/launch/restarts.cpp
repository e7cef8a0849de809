#include "tesserae/launch/restarts.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/seconds.h"
#include "tesserae/os/signals.h"

namespace tesserae::launch {
namespace {

void say(const std::string& text) {
  std::fprintf(stderr, "tesserae: %s\n", text.c_str());
}

/// Returns the signal that asked this process to end meanwhile, or 0.
int wait(std::chrono::milliseconds pause) {
  const os::StopSignals signals;
  os::wait_readable({signals.descriptor()}, os::Deadline(pause));
  return signals.first();
}

}  // namespace

int run_with_restarts(LocalJob job, const Restarts& restarts) {
  if (restarts.most > 0 && job.hosts > 1) {
    throw InvalidArgument("run_with_restarts", cat("a job of ", job.hosts, " hosts is not begun again by itself: its ",
                                                   "scheduler does that, on all of them"));
  }
  std::string last_error, last_saved;
  auto pause = restarts.first_pause;
  for (int restarted = 0;; ++restarted) {
    const os::TimePoint began = os::now();
    const JobEnd end = run_job(job);
    if (!end.failed || restarts.most == 0) return end.status;
    if (!end.error.empty() && end.error == last_error && end.saved == last_saved) {
      say("the same error ended the try before, so the job is not begun again");
      return end.status;
    }
    if (restarted == restarts.most) {
      say(cat("the job was begun again ", restarted, restarted == 1 ? " time" : " times", ", and may not be any more"));
      return end.status;
    }
    if (os::now() - began > restarts.longest_pause) pause = restarts.first_pause;
    say(cat("all ranks begin again in ", os::seconds_of(pause), " s (", restarted + 1, " of ", restarts.most, ")"));
    if (const int signal = wait(pause)) {  // nothing runs: the job has what it saved last, and may be started again
      return job.early_exit_code != 0 ? job.early_exit_code : 128 + signal;
    }
    pause = std::min(2 * pause, restarts.longest_pause);
    last_error = end.error;
    last_saved = end.saved;
    job.body = nullptr;  // this process has served a store by now: its copies would have half of that
    job.environment["TORCHELASTIC_RESTART_COUNT"] = std::to_string(restarted + 1);
    try {
      if (restarts.prepare) restarts.prepare(job, end);
    } catch (const IoError& error) {
      say(cat("the job is not begun again: ", error.what()));
      return end.status;
    }
  }
}

}  // namespace tesserae::launch
