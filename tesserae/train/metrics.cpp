#include "tesserae/train/metrics.h"

#include <algorithm>
#include <numeric>

namespace tesserae::train {
namespace {

constexpr size_t warm_up_steps = 3;
constexpr size_t averaged_losses = 10;

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace

std::string to_line(const StepRecord& record) {
  Json line = {{"step", record.step},
               {"loss", record.loss},
               {"lr", record.lr},
               {"grad_norm", record.grad_norm},
               {"tokens_per_second", record.tokens_per_second},
               {"step_ms", record.step_ms},
               {"comm_ms", record.comm_ms}};
  if (record.skipped) line["skipped"] = true;
  if (record.val_loss) line["val_loss"] = *record.val_loss;
  return line.dump();
}

Metrics::Metrics(const std::string& path) : file_(os::files().create(path)) {}

void Metrics::add(const StepRecord& record) {
  file_->write(to_line(record) + "\n");
  times_.push_back({record.step_ms, record.comm_ms, record.tokens_per_second * record.step_ms / 1e3});
  if (last_losses_.size() == averaged_losses) last_losses_.erase(last_losses_.begin());
  last_losses_.push_back(record.loss);
  running_.steps = record.step;
  running_.last_loss = record.loss;
  if (record.val_loss) {
    running_.val_loss = record.val_loss;
    running_.best_val_loss = std::min(running_.best_val_loss.value_or(*record.val_loss), *record.val_loss);
  }
}

RunFigures Metrics::figures() const {
  RunFigures figures = running_;
  if (times_.empty()) return figures;
  figures.final_loss =
      std::accumulate(last_losses_.begin(), last_losses_.end(), 0.0) / static_cast<double>(last_losses_.size());
  const size_t first = times_.size() > warm_up_steps ? warm_up_steps : 0;
  std::vector<double> steps;
  double total_ms = 0, comm_ms = 0, tokens = 0;
  for (size_t i = first; i < times_.size(); ++i) {
    steps.push_back(times_[i].step_ms);
    total_ms += times_[i].step_ms;
    comm_ms += times_[i].comm_ms;
    tokens += times_[i].tokens;
  }
  figures.step_ms_median = median(std::move(steps));
  if (total_ms > 0) {
    figures.tokens_per_second = tokens / total_ms * 1e3;
    figures.comm_share = comm_ms / total_ms;
  }
  return figures;
}

}  // namespace tesserae::train
