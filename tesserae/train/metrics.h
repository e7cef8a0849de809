#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/config/json.h"
#include "tesserae/experts/balance.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/os/files.h"

namespace tesserae::train {

/// How a step's last micro-batch was spread over experts, on all ranks.
struct ExpertFigures {
  double imbalance = 0;  ///< the most of an expert over the mean of its layer, in the worst layer
  double dropped = 0;    ///< share of all choices that were beyond a capacity
  double bytes = 0;      ///< that left ranks for experts of others and back, in forward
  int degree = 1;        ///< over how many ranks they are shared out
};
/// Of the loads of all layers; nothing if there are none.
std::optional<ExpertFigures> figures_of(const std::vector<experts::Load>& loads);

/// What a step brought from scratch files and to them, bytes of all ranks.
struct DiskFigures {
  double read = 0, written = 0;
  double waited = 0;  ///< seconds for which threads of rank 0 waited for a disk
};

/// One optimizer step, as rank 0 saw it.
struct StepRecord {
  int64_t step = 0;  ///< from 1
  double loss = 0;   ///< nats a token: the mean over all ranks and micro-batches
  double lr = 0;
  double grad_norm = 0;            ///< of the whole model, before clipping
  double tokens_per_second = 0;    ///< of all ranks together
  double step_ms = 0;              ///< wall clock, without evaluation
  double comm_ms = 0;              ///< of it, the time that the training thread waited for other ranks
  int ranks = 0;                   ///< of the job
  mesh::Degrees degrees;           ///< with which it ran
  double memory_bytes = 0;         ///< the most that any rank held during it
  double state_bytes = 0;          ///< parameters, masters and gradients that rank 0 holds between steps
  bool skipped = false;            ///< nothing was updated: see bad; or a loss scale was too high
  std::string bad = {};            ///< why its numbers are bad (optim/bad_steps.h); empty: they are good
  double replica_check_ms = 0;     ///< what comparing replicas after this step took; 0: they were not compared
  int64_t rolled_back_from = 0;    ///< the first step after the run went back from that one; 0: it did not
  std::optional<double> val_loss;  ///< if the model was evaluated after this step
  std::optional<ExpertFigures> experts = std::nullopt;  ///< if the model has any
  std::optional<DiskFigures> disk = std::nullopt;       ///< if state lies on one
};

/// In the run folder.
inline constexpr const char* metrics_name = "metrics.jsonl";

/// One line of metrics.jsonl, without the line end. Numbers that are not finite become null, as JSON has none.
std::string to_line(const StepRecord& record);
/// The inverse, as far as Metrics needs it (null becomes NaN); nothing for what is no such line.
std::optional<StepRecord> from_line(const std::string& line);

/// The lines of a metrics file that tell of steps up to `step`, as they stand there; of a step that is told twice, the
/// first. A line that was cut off when its writer died is left out. Nothing if there is no file.
std::vector<std::string> lines_until(const os::Path& file, int64_t step);

/// What the steps of a run have in common. The first steps are slower (buffers, caches): rates leave out the first 3
/// where there are more.
struct RunFigures {
  int64_t steps = 0;
  int64_t tokens = 0;     ///< of all steps, whatever the number of ranks
  double final_loss = 0;  ///< mean of the last 10 steps: one step's loss is noise
  double last_loss = 0;
  std::optional<double> val_loss, best_val_loss;  ///< the last one; the lowest one
  double tokens_per_second = 0;
  double step_ms_median = 0;
  double comm_share = 0;
};

/// Writes metrics.jsonl, a line as soon as a step has ended, and keeps what the summary needs (32 bytes a step).
class Metrics {
 public:
  /// `before`: lines of earlier steps, with which the file begins. They take the place of an older file in one step, so
  /// they may have come from it.
  explicit Metrics(const os::Path& path, const std::vector<std::string>& before = {});
  /// Throws IoError if the line cannot be written; it is then kept and written before the next one.
  void add(const StepRecord& record);
  /// Makes what was written so far last: a checkpoint should not outlive the lines that lead to it.
  void sync() { file_->sync(); }
  RunFigures figures() const;
  int64_t last_step() const { return running_.steps; }

 private:
  void count(const StepRecord& record);

  struct Times {
    double step_ms, comm_ms, tokens;
  };
  std::unique_ptr<os::WritableFile> file_;
  std::string pending_;  // lines that are not in the file, or not as a whole
  std::vector<Times> times_;
  std::vector<double> last_losses_;
  RunFigures running_;
};

}  // namespace tesserae::train
