#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tesserae/optim/target.h"

namespace tesserae::testing {

/// Shards of one rank, with sums and maxima over ranks that the test knows.
class JoinedTarget final : public optim::LocalTarget {
 public:
  using LocalTarget::LocalTarget;
  double sum_over_chunks(double value, std::vector<double>* /*also*/) override { return sum ? sum(value) : value; }
  double max_over_chunks(double value) override { return max ? max(value) : value; }

  std::function<double(double)> sum, max;
};

}  // namespace tesserae::testing
