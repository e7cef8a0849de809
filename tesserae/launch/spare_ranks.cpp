#include "tesserae/launch/spare_ranks.h"

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::launch {
namespace {

constexpr int64_t most_of_a_host = 1 << 20;

}  // namespace

SpareRanks::SpareRanks(const LocalJob& job, const Meeting& meeting, const RankSources& sources)
    : job_(job), meeting_(meeting), sources_(sources), next_number_(job.host * most_of_a_host) {}

void SpareRanks::keep(int needed) {
  const auto wanted = static_cast<size_t>(std::clamp(needed, 0, job_.spares));
  while (spares_.size() > wanted) spares_.pop_back();
  if (paused_until_ && !paused_until_->passed()) return;
  try {
    while (spares_.size() < wanted) {
      spares_.push_back({.number = next_number_, .process = start_rank(job_, {}, meeting_, sources_, next_number_)});
      ++next_number_;
    }
  } catch (const IoError& error) {
    log(LogLevel::warning, cat("no spare process can be started: ", error.what()));
    pause();
  }
}

void SpareRanks::pause() {
  paused_until_.emplace(job_.spare_pause);
}

std::optional<SpareRanks::Spare> SpareRanks::take(const Place& place) {
  while (!spares_.empty()) {
    Spare spare = std::move(spares_.front());
    spares_.erase(spares_.begin());
    if (spare.process.process->poll()) continue;
    spare.process.rank = place.rank;
    spare.process.local_rank = place.local_rank;
    return spare;
  }
  return std::nullopt;
}

void SpareRanks::add_outputs(std::vector<int>& descriptors) const {
  for (const Spare& spare : spares_) descriptors.push_back(spare.process.output.get());
}

std::vector<std::string> SpareRanks::read(int descriptor) {
  for (Spare& spare : spares_) {
    if (spare.process.output.get() == descriptor) return spare.process.read();
  }
  return {};
}

}  // namespace tesserae::launch
