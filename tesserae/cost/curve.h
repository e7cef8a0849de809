#pragma once

#include <vector>

namespace tesserae::cost {

/// A rate that depends on how much is done at once: measured points; between two of them it goes along a straight line
/// in logarithms, beyond the first and the last it stays.
class Curve {
 public:
  struct Point {
    double size = 0;
    double rate = 0;

    bool operator==(const Point&) const = default;
  };

  Curve() = default;
  /// The same at every size.
  explicit Curve(double rate) : Curve(std::vector<Point>{{1, rate}}) {}
  /// Points in any order. Throws InvalidArgument for none, for two of a size, and unless all numbers are finite and
  /// above 0.
  explicit Curve(std::vector<Point> points);

  /// False: nothing is known, and at() throws InvalidArgument.
  bool known() const { return !points_.empty(); }
  double at(double size) const;
  const std::vector<Point>& points() const { return points_; }

  bool operator==(const Curve&) const = default;

 private:
  std::vector<Point> points_;
};

}  // namespace tesserae::cost
