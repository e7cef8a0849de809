#include "tesserae/monitor/pulse.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::monitor {
namespace {

/// This process stops for that long, and goes on.
void stop_for(double seconds) {
  const std::string self = std::to_string(::getpid());
  ASSERT_EQ(std::system(cat("kill -STOP ", self, "; sleep ", seconds, "; kill -CONT ", self).c_str()), 0);
}

TEST(Pulse, TellsOfEachStopOnceForAllOfItsTime) {
  std::vector<double> stops;
  Pulse pulse([&](double seconds) { stops.push_back(seconds); });
  stop_for(1.5);
  pulse.beat();
  const std::vector<double> first = stops;
  pulse.beat();
  EXPECT_EQ(stops, first);
  ASSERT_FALSE(first.empty());  // more than one: the machine was busy besides
  EXPECT_GT(*std::ranges::max_element(first), 1.3);
}

TEST(Pulse, ALookOfAnotherThreadHidesNothing) {
  double stopped = 0;
  Pulse pulse([&](double seconds) { stopped += seconds; });
  std::jthread looks([&](const std::stop_token& end) {
    while (!end.stop_requested()) pulse.beat();
  });
  stop_for(1.5);
  looks.request_stop();
  looks.join();
  pulse.beat();
  EXPECT_GT(stopped, 1.2);
}

}  // namespace
}  // namespace tesserae::monitor
