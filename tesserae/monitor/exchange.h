#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tesserae/comm/liveness/time_limiter.h"
#include "tesserae/monitor/report.h"

namespace tesserae::monitor {

/// The reports and the wish of a job, in a store. Used by one thread of each rank. Once the store has failed, or has
/// not answered for ten seconds (its process is stopped, or its host lost), it is not asked again and nothing is
/// exchanged any more.
class Exchange {
 public:
  Exchange(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks);

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
  comm::TimeLimiter limiter_;
  bool works_ = true;
  std::set<int> heard_;  // ranks that have written something
};

}  // namespace tesserae::monitor
