#include "tesserae/cost/curve.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::cost {

Curve::Curve(std::vector<Point> points) : points_(std::move(points)) {
  if (points_.empty()) throw InvalidArgument("Curve", "no points");
  std::ranges::sort(points_, {}, &Point::size);
  for (size_t i = 0; i < points_.size(); ++i) {
    const auto [size, rate] = points_[i];
    const bool sound = std::isfinite(size) && std::isfinite(rate) && size > 0 && rate > 0;
    if (!sound) throw InvalidArgument("Curve", cat("a rate of ", rate, " at size ", size, ": both must be above 0"));
    if (i > 0 && points_[i - 1].size == size) throw InvalidArgument("Curve", cat("two rates at size ", size));
  }
}

double Curve::at(double size) const {
  if (!known()) throw InvalidArgument("Curve::at", "nothing is known");
  const auto after = std::ranges::upper_bound(points_, size, {}, &Point::size);
  if (after == points_.begin()) return points_.front().rate;
  if (after == points_.end()) return points_.back().rate;
  const Point &low = *(after - 1), &high = *after;
  const double share = std::log(size / low.size) / std::log(high.size / low.size);
  return low.rate * std::pow(high.rate / low.rate, share);
}

}  // namespace tesserae::cost
