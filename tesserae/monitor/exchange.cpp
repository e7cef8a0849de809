#include "tesserae/monitor/exchange.h"

#include <string>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::monitor {
namespace {

constexpr size_t most_asked_for = 64;  // keys in one request
constexpr const char* wish_key = "wish";

std::string report_key(int rank) {
  return cat("rank/", rank);
}

std::string_view text(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

Exchange::Exchange(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks, std::chrono::milliseconds patience)
    : store_(std::move(store)), rank_(rank), ranks_(ranks), patience_(patience) {}

// The store's own timeout does not hold for all requests: one to a process that is stopped never returns.
template <class Request>
auto Exchange::ask(Request request) -> std::optional<std::invoke_result_t<Request, c10d::Store&>> {
  given_up_ = given_up_ && limiter_.busy();
  if (given_up_ || (failed_ && os::now() - *failed_ < patience_)) return std::nullopt;
  std::string why;
  try {
    auto answer = limiter_.call([store = store_, request = std::move(request)] { return request(*store); }, patience_);
    failed_.reset();
    if (answer) {
      failures_ = 0;
      return answer;
    }
    given_up_ = true;
    why = cat("it has not answered for ", patience_.count(), " ms");
  } catch (const std::exception& error) {
    failed_ = os::now();
    why = error.what();
  }
  // Once, unless it is the store of a job that has just ended.
  const bool tell = ++failures_ == (given_up_ ? 1 : 2);
  log(tell ? LogLevel::warning : LogLevel::debug,
      cat("the monitor of this rank exchanges nothing until the store of the job answers: ", why));
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
    if (missing.size() < most_asked_for && rank + 1 < ranks_) continue;
    const auto come = ask([asked = std::exchange(missing, {})](c10d::Store& store) {
      std::vector<int> found;
      for (const int each : asked) {
        if (store.check({report_key(each)})) found.push_back(each);
      }
      return found;
    });
    if (come) heard_.insert(come->begin(), come->end());
  }
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
