#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace tesserae::comm {

/// Runs requests on a thread of its own, so that whoever asks can stop waiting: a request to a store whose process is
/// stopped never returns, nor can making connections be interrupted. Such a request, and what it captured, stay behind
/// with their thread; so requests capture values, not references.
class TimeLimiter {
 public:
  TimeLimiter();
  /// Does not wait for a request that was given up and still runs.
  ~TimeLimiter();

  /// What `request` returns; nothing if it takes longer than `limit`. Throws what it throws.
  template <class Request>
  auto call(Request request, std::chrono::milliseconds limit) -> std::optional<std::invoke_result_t<Request>> {
    auto future = begin(std::move(request));
    if (future.wait_for(limit) != std::future_status::ready) return std::nullopt;
    return future.get();
  }

  /// The same; nothing once `wanted()`, which is asked every 50 ms, says no.
  template <class Request>
  auto call_while(const std::function<bool()>& wanted, Request request)
      -> std::optional<std::invoke_result_t<Request>> {
    auto future = begin(std::move(request));
    while (future.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
      if (!wanted()) return std::nullopt;
    }
    return future.get();
  }

  /// Whether a request is under way, or waits for one: of the caller, one that was given up.
  bool busy() const;

 private:
  template <class Request>
  auto begin(Request request) -> std::future<std::invoke_result_t<Request>> {
    using Result = std::invoke_result_t<Request>;
    auto answer = std::make_shared<std::promise<Result>>();
    auto future = answer->get_future();
    post([request = std::move(request), answer] {
      try {
        answer->set_value(request());
      } catch (...) {
        answer->set_exception(std::current_exception());
      }
    });
    return future;
  }

  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> requests;
    int open = 0;  // posted and not ended
    bool closed = false;
  };
  static void serve(const std::shared_ptr<Queue>& queue);
  void post(std::function<void()> request);

  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

}  // namespace tesserae::comm
