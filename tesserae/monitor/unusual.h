#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace tesserae::monitor {

inline constexpr int64_t ignored_steps = 3;  ///< the first ones: buffers and caches are made

/// Of two in the middle the lower one: somebody is at it. 0 of nothing.
double lower_median(std::vector<double> values);

/// The newest values of something, and what is usual of them.
class Recent {
 public:
  static constexpr size_t remembered = 32;

  void add(double value);
  double median() const { return lower_median({values_.begin(), values_.end()}); }
  bool enough() const { return values_.size() >= 8; }  ///< to tell what is usual
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::deque<double> values_;
};

/// By how much values of several are off their own medians: what that share of all values does not exceed.
double deviation(std::span<const Recent> all, double share);
/// 1.4826 times the median of that, which is the standard deviation of what is normally distributed.
double variation(std::span<const Recent> all);

/// When something has become slow, and when that is over, from by how many seconds it is beyond what is usual in each
/// step.
///
/// It is slow if that is more than 10 ms, `least_share` of a step and four times its variation, in four steps in a row;
/// in two with 0.3 of a step, in one with half a step and eight times its variation. So it is if a part of it is, with
/// a variation of its own, for which 0.3 of a step and five times that variation are enough in one. It no longer is
/// when it was not for three steps; meanwhile it is told of again if it becomes four times as slow.
class Episode {
 public:
  /// Of a value: what of it is known to have gone somewhere.
  struct Part {
    double beyond = 0, variation = 0;
  };
  struct Usual {
    double step_seconds = 0;
    double variation = 0;
    double least_share = 0.1;
    std::span<const Part> parts = {};
  };
  enum class Turn { none, slow, over };

  /// One step more; steps ascend.
  Turn add(int64_t step, double beyond, const Usual& usual);

  /// In the last step it was beyond what is usual, slow or not.
  bool suspected() const { return suspected_ > 0; }
  bool slow() const { return told_ > 0; }
  int64_t since() const { return since_; }  ///< the first step in which it was so; 0: it is not

 private:
  int64_t since_ = 0;
  int64_t suspected_ = 0, clear_ = 0, quiet_ = 0;  // steps in a row
  double told_ = 0;                                // its seconds when it was told of last; 0: not yet
};

}  // namespace tesserae::monitor
