#pragma once

#include <cstddef>
#include <vector>

namespace tesserae::dial {

/// The standard deviation relative to the median, from the median deviation: one slow step does not count. `values`
/// must not be empty.
double relative_spread(const std::vector<double>& values);

/// What steps of layouts are believed to take: the plan's prediction, corrected by what was measured of some.
///
/// A step takes C + x1 K1 + x2 K2 + ... + d seconds. K are the stages that the plan predicts of a layout (gathers,
/// reductions, ...). C, the same for all layouts, comes from the first visit. x, by how much a stage comes true (less
/// than 1 where computing hides it), and d, what the plan does not know of this one layout, have errors that
/// belief.cpp states, all of them times a factor from 1 on: the one with which what was measured is likeliest. All are
/// normal, so what is believed of each layout is what linear algebra makes of the visits (a Gaussian process: Rasmussen
/// and Williams, 2006, section 2.2). A prediction that is right thus needs few visits, and one that is wrong shows it.
///
/// Layouts are numbered as given. Seconds; values only; used from one thread.
class Belief {
 public:
  /// Of each layout, the seconds of each stage.
  explicit Belief(std::vector<std::vector<double>> stages);

  /// Steps of one visit, at least one. Others of the same layout count beside it.
  void saw(std::size_t layout, const std::vector<double>& seconds);
  /// The machine's speed has changed since: all that was seen took so many times as long.
  void rescale(double factor);

  bool visited(std::size_t layout) const;
  /// The median of its steps over all visits. It must have been visited.
  double measured(std::size_t layout) const;
  /// What the plan said before the layout was visited: with C of the first visit, each stage as predicted.
  double predicted(std::size_t layout) const;
  double seconds(std::size_t layout) const;                     ///< that a step is believed to take
  double error(std::size_t layout, std::size_t against) const;  ///< standard deviation of the difference of two
  /// By how much `other` can be expected to be faster than `best`, the fastest as believed, once a visit of so many
  /// steps of `layout`, one of the two, was seen: 0 where it could tell nothing. Of one that never ran: once it is
  /// known well.
  double expected_gain(std::size_t layout, std::size_t other, std::size_t best, int steps) const;

  /// How many times the stated error the prediction has, as far as visits tell.
  double surprise() const { return scale_; }
  double noise() const { return noise_; }  ///< of a step, relative

 private:
  struct Visit {
    std::size_t layout;
    std::vector<double> seconds;
    double middle = 0;
  };

  double covariance(std::size_t a, std::size_t b) const;
  double believed_covariance(std::size_t a, std::size_t b) const;
  double noise_of(std::size_t steps) const;
  std::vector<double> weights(std::size_t layout) const;
  double fit(double scale);
  void fit();

  std::vector<std::vector<double>> stages_;
  std::vector<Visit> visits_;
  double noise_ = 0, scale_ = 1;
  std::vector<std::vector<double>> root_;  // Cholesky's, of the covariance of visits
  std::vector<double> residual_;           // root^-1 (seen - expected)
};

}  // namespace tesserae::dial
