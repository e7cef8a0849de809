#include "tesserae/monitor/exchange.h"

#include <string>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::monitor {
namespace {

constexpr std::chrono::seconds store_patience(10);
constexpr const char* wish_key = "wish";

std::string report_key(int rank) {
  return cat("rank/", rank);
}

std::string_view text(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

Exchange::Exchange(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks)
    : store_(std::move(store)), rank_(rank), ranks_(ranks) {}

// The store's own timeout does not hold for all requests: one to a process that is stopped never returns.
template <class Request>
auto Exchange::ask(Request request) -> std::optional<std::invoke_result_t<Request, c10d::Store&>> {
  if (!works_) return std::nullopt;
  try {
    auto answer =
        limiter_.call([store = store_, request = std::move(request)] { return request(*store); }, store_patience);
    if (answer) return answer;
    log(LogLevel::debug, "the store of the job does not answer: the monitor hears of other ranks no more");
  } catch (const std::exception& error) {
    log(LogLevel::debug, cat("the monitor hears of other ranks no more: ", error.what()));
  }
  works_ = false;
  return std::nullopt;
}

void Exchange::set(const std::string& key, const std::string& value) {
  ask([key, bytes = std::vector<uint8_t>(value.begin(), value.end())](c10d::Store& store) {
    store.set(key, bytes);
    return true;
  });
}

void Exchange::write(const Report& report) {
  set(report_key(rank_), to_bytes(report));
}

void Exchange::write(const Wish& wish) {
  set(wish_key, to_bytes(wish));
}

std::optional<Wish> Exchange::read_wish() {
  const auto bytes =
      ask([](c10d::Store& store) { return store.check({wish_key}) ? store.get(wish_key) : std::vector<uint8_t>(); });
  if (!bytes || bytes->empty()) return std::nullopt;
  return wish_from(text(*bytes));
}

// Asks for what is there only: a store waits for a key that is missing.
std::vector<std::pair<int, Report>> Exchange::read_reports(int64_t generation) {
  std::vector<int> missing;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_ && !heard_.contains(rank)) missing.push_back(rank);
  }
  const auto come = ask([missing](c10d::Store& store) {
    std::vector<int> found;
    for (const int rank : missing) {
      if (store.check({report_key(rank)})) found.push_back(rank);
    }
    return found;
  });
  if (come) heard_.insert(come->begin(), come->end());
  std::vector<std::pair<int, Report>> reports;
  if (heard_.empty()) return reports;
  const auto values = ask([ranks = heard_](c10d::Store& store) {
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(report_key(rank));
    return store.multiGet(keys);
  });
  if (!values) return reports;
  auto value = values->begin();
  for (const int rank : heard_) {
    try {
      Report report = report_from(text(*value++));
      if (report.generation == generation) reports.emplace_back(rank, std::move(report));
    } catch (const Corruption& error) {
      log(LogLevel::debug, cat("rank ", rank, ": ", error.what()));
    }
  }
  return reports;
}

}  // namespace tesserae::monitor
