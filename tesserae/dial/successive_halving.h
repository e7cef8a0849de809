#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "tesserae/mesh/layout.h"

namespace tesserae::dial {

/// The middle value; of an even count, the upper of the two. `values` must not be empty.
double median(std::vector<double> values);
/// The standard deviation relative to the median, from the median deviation: one slow step does not count.
double relative_spread(const std::vector<double>& values);

/// Finds which of some layouts has the shortest step from few steps of each, by successive halving (Karnin, Koren and
/// Somekh, "Almost Optimal Exploration in Multi-Armed Bandits", ICML 2013): all are visited once; the slower half
/// leaves; the others are visited again, until one is left. The steps of all visits of a layout count together, so
/// that those which are nearly as fast are compared over the same minutes of a machine whose speed varies.
///
/// Values only; used from one thread.
class SuccessiveHalving {
 public:
  /// Begins with the layout in use, of which steps of so many seconds are known.
  SuccessiveHalving(const mesh::Degrees& in_use, std::vector<double> seconds);

  /// A visit of one more layout, as long as again() was not asked.
  void visit(const mesh::Degrees& degrees);
  /// A step of a layout that was visited; of others: ignored.
  void add(const mesh::Degrees& degrees, double seconds);
  /// The next visit of those that are left, never to where the last one was; nothing: one is left.
  std::optional<mesh::Degrees> again();

  bool first_round() const { return first_round_; }
  bool visited_again() const { return visited_again_; }  ///< some layouts
  /// Of those that are left, the one with the shortest step so far.
  const mesh::Degrees& best() const;
  /// The median of its steps. Throws InvalidArgument if it has none.
  double seconds(const mesh::Degrees& degrees) const;
  /// The standard deviation of that median, relative to it.
  double noise(const mesh::Degrees& degrees) const;
  /// All that have a step, in the order of their visits.
  std::vector<mesh::Degrees> measured() const;

 private:
  struct Arm {
    mesh::Degrees degrees;
    std::vector<double> seconds;
    bool left = true;
  };

  const Arm& arm(const mesh::Degrees& degrees) const;
  void halve();

  std::vector<Arm> arms_;
  std::deque<mesh::Degrees> queue_;  // of this round
  mesh::Degrees last_;               // where the last visit was
  bool first_round_ = true, visited_again_ = false;
};

}  // namespace tesserae::dial
