#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "tesserae/comm/liveness/liveness_store.h"
#include "tesserae/comm/liveness/time_limiter.h"

namespace tesserae::comm {

/// The job's store as one thread asks it, which must never wait for long: a request that takes too long is given up,
/// and until it has ended nothing more is asked; after one that failed nothing ever is. Of one thread.
class AskedStore {
 public:
  static constexpr std::chrono::milliseconds patience{2000};

  /// `gone` is called once, when a request has failed.
  AskedStore(std::shared_ptr<LivenessStore> store, std::function<void()> gone)
      : store_(std::move(store)), gone_(std::move(gone)) {}

  /// What `request(store)` returns; nothing if the store does not answer. Captures values only (TimeLimiter).
  template <class Request>
  auto ask(Request request, std::chrono::milliseconds limit = patience)
      -> std::optional<std::invoke_result_t<Request, LivenessStore&>> {
    if (!may_ask()) return std::nullopt;
    try {
      auto answer = limiter_.call([request = std::move(request), store = store_] { return request(*store); }, limit);
      if (!answer) stall();
      return answer;
    } catch (const std::exception& failure) {
      fail(failure.what());
      return std::nullopt;
    }
  }

  /// It has been silent for too long, and may answer again.
  bool stalls() const { return state_ == State::stalls; }
  bool is_gone() const { return state_ == State::gone; }

 private:
  enum class State { answers, stalls, gone };
  bool may_ask();
  void stall();
  void fail(const std::string& why);

  std::shared_ptr<LivenessStore> store_;
  std::function<void()> gone_;
  TimeLimiter limiter_;
  State state_ = State::answers;
};

}  // namespace tesserae::comm
