#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/os/files.h"
#include "tesserae/train/json.h"

namespace tesserae::train {

/// One optimizer step, as rank 0 saw it.
struct StepRecord {
  int64_t step = 0;  ///< from 1
  double loss = 0;   ///< nats a token: the mean over all ranks and micro-batches
  double lr = 0;
  double grad_norm = 0;            ///< of the whole model, before clipping
  double tokens_per_second = 0;    ///< of all ranks together
  double step_ms = 0;              ///< wall clock, without evaluation
  double comm_ms = 0;              ///< of it, the time that the training thread waited for other ranks
  bool skipped = false;            ///< the gradients were not finite: nothing was updated
  std::optional<double> val_loss;  ///< if the model was evaluated after this step
};

/// One line of metrics.jsonl, without the line end. Numbers that are not finite become null, as JSON has none.
std::string to_line(const StepRecord& record);

/// What the steps of a run have in common. The first steps are slower (buffers, caches): rates leave out the first 3
/// where there are more.
struct RunFigures {
  int64_t steps = 0;
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
  explicit Metrics(const std::string& path);
  void add(const StepRecord& record);
  RunFigures figures() const;

 private:
  struct Times {
    double step_ms, comm_ms, tokens;
  };
  std::unique_ptr<os::WritableFile> file_;
  std::vector<Times> times_;
  std::vector<double> last_losses_;
  RunFigures running_;
};

}  // namespace tesserae::train
