#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/comm/liveness/time_limiter.h"
#include "tesserae/monitor/report.h"
#include "tesserae/os/clock.h"

namespace tesserae::monitor {

/// The reports and the wish of a job, in a store. Used by one thread of each rank. While the store does not answer (its
/// process is stopped, or its host lost), and for a while after it failed, it is not asked and nothing is exchanged.
class Exchange {
 public:
  /// `patience`: for an answer, and how long a store that failed is left alone.
  Exchange(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
           std::chrono::milliseconds patience = std::chrono::seconds(10));

  void write(const Report& report);
  void write(const Wish& wish);
  std::optional<Wish> read_wish();
  /// The newest reports of the other ranks, of that generation: of those that have written one. What is none is
  /// skipped.
  std::vector<std::pair<int, Report>> read_reports(int64_t generation);

 private:
  template <class Request>
  auto ask(Request request) -> std::optional<std::invoke_result_t<Request, c10d::Store&>>;
  void set(const std::string& key, const std::string& value);

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, ranks_;
  const std::chrono::milliseconds patience_;
  comm::TimeLimiter limiter_;
  bool given_up_ = false;  // a request that may still be under way
  int failures_ = 0;       // in a row
  std::optional<os::TimePoint> failed_;
  std::set<int> heard_;  // ranks that have written something
};

}  // namespace tesserae::monitor
