#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "tesserae/monitor/step_times.h"

namespace tesserae::monitor {

/// Steps of a job whose ranks each take 10 ms to read, 80 forward, 160 backward and 30 to update, give or take
/// `noise`, and wait for each other in reduce.
class Job {
 public:
  Job(int ranks, double noise) : ranks_(static_cast<size_t>(ranks)), noise_(noise) {}

  std::vector<StepTimes> step() {
    ++number_;
    std::vector<StepTimes> all(ranks_);
    double longest = 0;
    for (StepTimes& times : all) {
      times.step = number_;
      at(times, Stage::data) = 0.010 * vary();
      at(times, Stage::forward) = 0.080 * vary();
      at(times, Stage::backward) = 0.160 * vary();
      at(times, Stage::optimizer) = 0.030 * vary();
    }
    if (disturb) disturb(number_, all);
    for (const StepTimes& times : all) longest = std::max(longest, sum_of(times.seconds));
    for (StepTimes& times : all) {
      at(times, Stage::reduce) += longest - sum_of(times.seconds) + 0.002;
    }
    if (disturb_links) disturb_links(number_, all);
    for (StepTimes& times : all) times.total = sum_of(times.seconds);
    return all;
  }

  static double& at(StepTimes& times, Stage stage) { return times.seconds[static_cast<size_t>(stage)]; }
  /// What ranks do, before they wait for each other; and how long all wait beyond that.
  std::function<void(int64_t step, std::vector<StepTimes>&all)> disturb, disturb_links;

 private:
  double vary() { return 1 + noise_ * normal_(random_); }

  size_t ranks_;
  double noise_;
  int64_t number_ = 0;
  std::mt19937 random_{7};
  std::normal_distribution<double> normal_;
};

}  // namespace tesserae::monitor
