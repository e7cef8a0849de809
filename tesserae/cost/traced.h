#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tesserae/cost/workload.h"

namespace tesserae::cost {

/// A model of a script, as python/tesserae/planning/ has traced it: its units, and what one forward and backward of its
/// batch computes and keeps. Trained on data-parallel ranks alone (T = C = 1).
class Traced final : public Workload {
 public:
  /// So many bytes whatever the batch, and so many more for each row of it.
  struct Linear {
    double fixed = 0, row = 0;
    double at(double rows) const { return fixed + row * rows; }
  };
  /// Products of equal size, of one row of the batch.
  struct Products {
    double multiplications = 0;  ///< of one of them
    double calls = 0;
    bool batched = false;  ///< more rows are more of them; false: larger ones
  };
  struct Attention {
    int64_t tokens = 0;     ///< of a sequence of queries
    double operations = 0;  ///< of one row
  };
  /// A forward and its backward.
  struct Pass {
    /// Bytes alive at a moment, beside parameters and their gradients: of those moments that are the fullest for some
    /// number of rows. Not empty.
    std::vector<Linear> moments;
    Linear blocks;  ///< of these, what units have kept when the forward ends
    std::vector<Products> products = {};
    std::vector<Attention> attention = {};

    double peak(double rows) const;  ///< bytes at the fullest moment
  };

  /// Throws InvalidArgument for what the tracer does not write.
  explicit Traced(const nlohmann::json& document);

  const std::string& dtype() const { return dtype_; }

  std::string text() const override;
  nlohmann::ordered_json json() const override;
  std::string unit_of_batch(const Execution& run) const override;
  bool can_split(int tensor) const override { return tensor == 1; }
  bool can_cut(int context) const override { return context == 1; }
  void set_sizes(Facts& facts, int tensor, int expert) const override;
  Activations activations(const Execution& run) const override;
  ComputeTime compute_time(const Execution& run, const Machine& machine, const std::string& dtype) const override;
  AxisTraffic tensor_traffic(const Execution& /*run*/) const override { return {}; }
  AxisTraffic context_traffic(const Execution& /*run*/) const override { return {}; }
  double process() const override { return process_; }

 private:
  const Pass& pass(const Execution& run) const { return run.recompute ? recomputed_ : kept_; }

  std::string name_, dtype_;
  int64_t parameters_ = 0, trained_ = 0, root_ = 0, trained_root_ = 0;
  std::vector<int64_t> units_, trained_units_;  // elements of each but the root; those of them with gradients
  double process_ = 0;
  Pass kept_, recomputed_;
};

}  // namespace tesserae::cost
