#include "tesserae/train/metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tesserae/base/median.h"

namespace tesserae::train {
namespace {

constexpr size_t warm_up_steps = 3;
constexpr size_t averaged_losses = 10;

}  // namespace

std::optional<ExpertFigures> figures_of(const std::vector<experts::Load>& loads) {
  if (loads.empty()) return std::nullopt;
  ExpertFigures figures;
  double choices = 0;
  for (const experts::Load& load : loads) {
    figures.imbalance = std::max(figures.imbalance, load.imbalance());
    figures.dropped += static_cast<double>(load.dropped);
    figures.bytes += static_cast<double>(load.bytes);
    for (const int64_t tokens : load.tokens) choices += static_cast<double>(tokens);
  }
  if (choices > 0) figures.dropped /= choices;
  return figures;
}

std::string to_line(const StepRecord& record) {
  config::Json line = {{"step", record.step},
                       {"loss", record.loss},
                       {"lr", record.lr},
                       {"grad_norm", record.grad_norm},
                       {"tokens_per_second", record.tokens_per_second},
                       {"step_ms", record.step_ms},
                       {"comm_ms", record.comm_ms},
                       {"ranks", record.ranks},
                       {"degrees", {record.degrees.parameters, record.degrees.gradients, record.degrees.optimizer}},
                       {"memory_bytes", static_cast<int64_t>(record.memory_bytes)},
                       {"state_bytes", static_cast<int64_t>(record.state_bytes)}};
  if (record.skipped) line["skipped"] = true;
  if (!record.bad.empty()) line["bad"] = record.bad;
  if (record.rolled_back_from > 0) line["rolled_back_from"] = record.rolled_back_from;
  if (record.val_loss) line["val_loss"] = *record.val_loss;
  if (record.replica_check_ms > 0) line["replica_check_ms"] = record.replica_check_ms;
  if (record.experts) {
    line["expert_parallel_degree"] = record.experts->degree;
    line["expert_imbalance"] = record.experts->imbalance;
    line["expert_dropped"] = record.experts->dropped;
    line["expert_bytes"] = static_cast<int64_t>(record.experts->bytes);
  }
  if (record.disk) {
    line["disk_read_bytes"] = static_cast<int64_t>(record.disk->read);
    line["disk_written_bytes"] = static_cast<int64_t>(record.disk->written);
    line["disk_wait_ms"] = 1e3 * record.disk->waited;
  }
  return line.dump();
}

std::optional<StepRecord> from_line(const std::string& line) {
  const config::Json json = config::Json::parse(line, /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) return std::nullopt;
  const auto number = [&json](const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_number() ? found->get<double>() : std::nan("");
  };
  StepRecord record;
  record.step = json["step"];
  record.loss = number("loss");
  record.lr = number("lr");
  record.grad_norm = number("grad_norm");
  record.tokens_per_second = number("tokens_per_second");
  record.step_ms = number("step_ms");
  record.comm_ms = number("comm_ms");
  const auto whole = [](const config::Json& value) { return value.is_number_integer(); };
  if (const auto found = json.find("ranks"); found != json.end() && whole(*found)) record.ranks = *found;
  if (const auto found = json.find("degrees");
      found != json.end() && found->is_array() && found->size() == 3 && std::ranges::all_of(*found, whole)) {
    record.degrees = {.parameters = found->at(0), .gradients = found->at(1), .optimizer = found->at(2)};
  }
  record.skipped = json.value("skipped", false);
  record.bad = json.value("bad", "");
  record.rolled_back_from = json.value("rolled_back_from", int64_t{0});
  if (json.contains("val_loss")) record.val_loss = number("val_loss");
  return record;
}

std::vector<std::string> lines_until(const os::Path& file, int64_t step) {
  std::vector<std::string> kept;
  if (!os::files().exists(file)) return kept;
  const std::string text = os::files().read(file);
  int64_t last = 0;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    std::string line = text.substr(begin, end - begin);
    const std::optional<StepRecord> record = from_line(line);
    if (!record || record->step <= last || record->step > step) continue;
    last = record->step;
    kept.push_back(std::move(line));
  }
  return kept;
}

Metrics::Metrics(const os::Path& path, const std::vector<std::string>& before) {
  if (before.empty()) {
    file_ = os::files().create(path);
    return;
  }
  const os::Path draft = path.native() + ".tmp";
  {
    const auto file = os::files().create(draft);
    for (const std::string& line : before) {
      file->write(line + "\n");
      if (const auto record = from_line(line)) count(*record);
    }
    file->sync();
    file->close();
  }
  os::files().rename(draft, path);
  file_ = os::files().append(path);
}

void Metrics::add(const StepRecord& record) {
  count(record);
  pending_ += to_line(record) + "\n";
  try {
    file_->write(pending_);
    pending_.clear();
  } catch (const IoError&) {
    // A part of it may be there: an end of line keeps that apart from what comes.
    if (!pending_.starts_with("\n")) pending_.insert(0, "\n");
    throw;
  }
}

void Metrics::count(const StepRecord& record) {
  times_.push_back({record.step_ms, record.comm_ms, record.tokens_per_second * record.step_ms / 1e3});
  if (last_losses_.size() == averaged_losses) last_losses_.erase(last_losses_.begin());
  last_losses_.push_back(record.loss);
  running_.steps = record.step;
  running_.tokens += std::llround(times_.back().tokens);
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
