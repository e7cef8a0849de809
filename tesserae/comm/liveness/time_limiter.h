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
/// stopped never returns. Such a request, and what it captured, stay behind with their thread; so requests capture
/// values, not references.
class TimeLimiter {
 public:
  TimeLimiter();
  /// Does not wait for a request that was given up and still runs.
  ~TimeLimiter();

  /// What `request` returns; nothing if it takes longer than `limit`. Throws what it throws.
  template <class Request>
  auto call(Request request, std::chrono::milliseconds limit) -> std::optional<std::invoke_result_t<Request>> {
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
    if (future.wait_for(limit) != std::future_status::ready) return std::nullopt;
    return future.get();
  }

  /// Whether a request is under way, or waits for one: of the caller, one that was given up.
  bool busy() const;

 private:
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
