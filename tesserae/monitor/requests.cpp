#include "tesserae/monitor/requests.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/monitor/chrome_trace.h"
#include "tesserae/os/seconds.h"

namespace tesserae::monitor {
namespace {

constexpr int most_tries = 6;
constexpr double trace_patience = 60;          // beside ten times what the steps should take
constexpr size_t most_spans_traced = 1 << 20;  // 200 MB of text
constexpr double stacks_patience = 10;         // seconds until a rank that has not answered is called silent

}  // namespace

Requests::Requests(const os::Path& run)
    : lines_(run / socket_name,
             {.name = "the monitor",
              .answer = [this](int64_t client, const std::string& line) { return answer(client, line); },
              .refusal = [](const std::string& why) { return dial::error_event(why).dump(); },
              .farewell = dial::run_ended}) {}

// On the server's thread.
os::LineServer::Answer Requests::answer(int64_t client, const std::string& line) {
  constexpr const char* function = "monitor";
  const Json request = Json::parse(line, /*cb=*/nullptr, /*allow_exceptions=*/false);
  const auto ask = request.is_object() ? request.find("ask") : request.end();
  if (!request.is_object() || ask == request.end() || (*ask != "stacks" && *ask != "trace")) {
    throw InvalidArgument(function, "a request is {\"ask\": \"stacks\"} or {\"ask\": \"trace\", \"steps\": 3}");
  }
  Asked asked{.client = client};
  if (*ask == "trace") {
    const Json steps = request.value("steps", Json());
    const bool fits = steps.is_number_integer() && steps >= 1 && steps <= most_traced_steps;
    if (!fits) throw InvalidArgument(function, cat("steps is ", steps.dump(), ": 1 to ", most_traced_steps));
    asked.steps = steps;
  }
  const std::scoped_lock lock(mutex_);
  waiting_.push_back(asked);
  return {.lines = {Json{{"event", "accepted"}}.dump()}, .last = false};
}

void Requests::ask_for_stacks() {
  const std::scoped_lock lock(mutex_);
  waiting_.push_back({});
}

void Requests::tell(const Json& event) {
  if (at_hand_->client != 0) lines_.tell(at_hand_->client, event.dump(), /*last=*/true);
}

void Requests::look(Board& board, Wish& wish, RunFiles& files, const std::vector<std::string>& units,
                    double round_seconds) {
  if (at_hand_ && (at_hand_->steps > 0 ? write_trace(board, wish, files, units, round_seconds)
                                       : write_stacks(board, wish, files))) {
    at_hand_.reset();
  }
  wish.waits = at_hand_.has_value();
  {
    const std::scoped_lock lock(mutex_);
    // Where a job hangs, a trace would wait for ever: stacks come first.
    const auto next = std::ranges::find(waiting_, 0, &Asked::steps);
    if (at_hand_ && (at_hand_->steps == 0 || next == waiting_.end())) return;
    if (waiting_.empty()) return;
    const Asked asked = next == waiting_.end() ? waiting_.front() : *next;
    waiting_.erase(next == waiting_.end() ? waiting_.begin() : next);
    if (at_hand_) waiting_.push_back(*at_hand_);
    at_hand_ = asked;
  }
  tries_ = 0;
  begin(board, wish, round_seconds);
}

void Requests::begin(const Board& board, Wish& wish, double round_seconds) {
  begun_ = os::now();
  wish.waits = true;
  if (at_hand_->steps == 0) {
    ++wish.stacks;
    return;
  }
  const size_t spans = board.spans_of_step() * board.ranks() * static_cast<size_t>(at_hand_->steps);
  if (spans > most_spans_traced) {
    tell(dial::error_event(cat("a trace of ", at_hand_->steps, " steps of ", board.ranks(), " ranks has about ", spans,
                               " spans, of ", most_spans_traced, " that it may have: take fewer steps")));
    at_hand_.reset();
    return;
  }
  // All ranks must have heard of it before the first of these steps begins: three rounds, if nobody is late.
  const double step = std::max(board.step_seconds(), 1e-4);
  const double rounds = 3 << tries_++;
  wish.keep_first = board.step() + 2 + static_cast<int64_t>(std::ceil(rounds * round_seconds / step));
  wish.keep_last = wish.keep_first + at_hand_->steps - 1;
}

bool Requests::write_stacks(Board& board, const Wish& wish, RunFiles& files) {
  const std::vector<std::string> all = board.stacks(wish.stacks);
  Json written = Json::array(), silent = Json::array();
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) silent.push_back(rank);
  }
  if (!silent.empty() && os::seconds_since(begun_) < stacks_patience) return false;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    if (const auto path = files.write_stacks(static_cast<int>(rank), all[rank])) written.push_back(path->native());
  }
  board.forget_stacks();
  tell({{"event", "stacks"}, {"files", std::move(written)}, {"silent", std::move(silent)}});
  return true;
}

bool Requests::write_trace(Board& board, Wish& wish, RunFiles& files, const std::vector<std::string>& units,
                           double round) {
  const auto kept = board.take_kept(wish.keep_first);
  if (kept.empty()) {
    const auto expected = static_cast<double>(wish.keep_last - board.step()) * board.step_seconds();
    if (os::seconds_since(begun_) < trace_patience + 10 * std::max(0.0, expected)) return false;
    tell(dial::error_event("the steps do not come: the job has ended, or hangs (`tesserae stacks` tells where)"));
    return true;
  }
  const auto steps = static_cast<size_t>(at_hand_->steps);
  if (std::ranges::any_of(kept, [steps](const auto& timelines) { return timelines.size() < steps; })) {
    if (tries_ < most_tries) {
      begin(board, wish, round);
      return false;
    }
    tell(dial::error_event("ranks hear of what is asked too late to take part: their hosts are too busy; try again"));
    return true;
  }
  const auto file = files.write_trace(wish.keep_first, chrome_trace(kept, units));
  tell(file ? Json{{"event", "trace"}, {"file", file->native()}, {"first", wish.keep_first}, {"last", wish.keep_last}}
            : dial::error_event("the trace could not be written; the job's log says why"));
  return true;
}

}  // namespace tesserae::monitor
