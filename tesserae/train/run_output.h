#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tesserae/train/job_setup.h"
#include "tesserae/train/metrics.h"
#include "tesserae/train/progress.h"
#include "tesserae/train/restore.h"
#include "tesserae/train/resume.h"
#include "tesserae/train/summary.h"

namespace tesserae::train {

/// What a run shows and writes: its folder (config.json, metrics.jsonl, summary.json) and standard output. Rank 0's.
class RunOutput {
 public:
  /// Begins: takes over the metrics of the run that is continued up to `origin`'s step, and says what will happen.
  /// Throws IoError.
  RunOutput(const config::Config& config, const JobSetup& setup, const RunFolders& folders,
            const std::optional<Origin>& origin);

  /// A line of metrics that cannot be written is an error in the log, once, and is written later if that works.
  void add(const StepRecord& record);
  void say(const std::string& line) { progress_.say(line); }
  int64_t last_step() const { return metrics_.last_step(); }  ///< whose line is written
  /// The run has gone back to `step`: lines of later steps are taken away.
  void go_back(int64_t step);
  /// Before something that takes a while and is no step.
  void clear_line() { progress_.clear(); }
  /// Metrics that were written are on the medium, if that is possible.
  void sync();
  /// The last words: `sample` may be empty.
  void finish(const RunFacts& facts, const std::string& sample);

 private:
  std::string final_line(const RunFigures& figures, const RunFacts& facts) const;

  os::Path folder_;
  Metrics metrics_;
  Progress progress_;
  bool told_of_failure_ = false;
};

}  // namespace tesserae::train
