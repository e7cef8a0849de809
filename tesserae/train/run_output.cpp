#include "tesserae/train/run_output.h"

#include <utility>

#include "tesserae/base/log.h"
#include "tesserae/os/memory.h"

namespace tesserae::train {
namespace {

constexpr const char* summary_name = "summary.json";

/// A run that starts anew in a folder that it shares with an earlier attempt keeps what that one measured.
void set_aside(const os::Path& folder) {
  const os::FileStatus found = os::files().status(folder / metrics_name);
  if (found.kind == os::FileKind::missing || found.size == 0) return;
  for (int number = 1;; ++number) {
    const os::Path name = folder / cat("metrics-", number, ".jsonl");
    if (os::files().exists(name)) continue;
    os::files().rename(folder / metrics_name, name);
    return;
  }
}

Metrics open_metrics(const RunFolders& folders, const std::optional<Origin>& origin) {
  std::vector<std::string> before;
  if (origin && !folders.history.empty()) before = lines_until(folders.history, origin->step);
  if (before.empty()) set_aside(folders.run);
  Metrics metrics(folders.run / metrics_name, before);
  os::files().sync_directory(folders.run);
  return metrics;
}

}  // namespace

RunOutput::RunOutput(const config::Config& config, const JobSetup& setup, const RunFolders& folders,
                     const std::optional<Origin>& origin)
    : folder_(folders.run),
      metrics_(open_metrics(folders, origin)),
      progress_(config.train.steps, config.run.log_every) {
  config::Json resolved = config.resolved;
  resolved["model"]["vocabulary"] = setup.model.vocabulary;
  os::files().write(folder_ / "config.json", resolved.dump(2) + "\n");
  os::files().remove_all(folder_ / summary_name);  // of an earlier part of this run
  say(describe(setup, config));
  say(cat("run folder: ", folder_.native()));
  if (origin) {
    say(cat("resumed at step ", origin->step, " from ", origin->from));
    if (origin->step >= config.train.steps) say(cat("train.steps is ", config.train.steps, ": there is nothing to do"));
  } else if (folders.continues) {
    say(cat("no checkpoint in ", folders.checkpoints.native(), " yet: starting from step 0"));
  }
}

void RunOutput::add(const StepRecord& record) {
  try {
    metrics_.add(record);
    told_of_failure_ = false;
  } catch (const IoError& error) {
    // A full disk is a reason to act, not to lose the run: whether it may go on is for checkpoint.on_error to say.
    if (!std::exchange(told_of_failure_, true)) log(LogLevel::error, cat(error.what(), "; will be tried again"));
  }
  progress_.step(record, os::peak_resident());
}

void RunOutput::go_back(int64_t step) {
  const os::Path file = folder_ / metrics_name;
  try {
    metrics_ = Metrics(file, lines_until(file, step));
  } catch (const IoError& error) {
    log(LogLevel::error, cat(error.what(), "; the metrics keep steps that were undone"));
  }
}

void RunOutput::sync() {
  try {
    metrics_.sync();
  } catch (const IoError& error) {
    log(LogLevel::error, error.what());
  }
}

void RunOutput::finish(const RunFacts& facts, const std::string& sample) {
  const RunFigures figures = metrics_.figures();
  os::files().write(folder_ / summary_name, make_summary(figures, facts).dump(2) + "\n");
  progress_.clear();
  if (!sample.empty()) say("\nA sample:\n" + sample + "\n");
  say(final_line(figures, facts));
}

std::string RunOutput::final_line(const RunFigures& figures, const RunFacts& facts) const {
  std::string line = cat(facts.stopped_by == 0 && facts.broken_off.empty() ? "done: " : "stopped: ", figures.steps,
                         " steps in ", short_time(facts.seconds), ", loss ", figures.final_loss);
  if (facts.stopped_by != 0) line += cat(", asked by ", facts.stop_reason);
  if (!facts.broken_off.empty()) line += ", for its bad numbers";
  if (figures.val_loss) line += cat(", validation loss ", *figures.val_loss);
  line += cat(", ", short_number(figures.tokens_per_second), " tokens/s; see ", (folder_ / summary_name).native());
  return line;
}

}  // namespace tesserae::train
