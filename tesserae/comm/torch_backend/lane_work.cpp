#include "tesserae/comm/torch_backend/lane_work.h"

#include <ATen/Parallel.h>

#include "tesserae/comm/error.h"

namespace tesserae::comm {

LaneWork::LaneWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                   std::vector<at::Tensor> outputs, uint64_t sequence, std::chrono::milliseconds limit)
    : Work(rank, type, title, inputs),
      title_(title),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      limit_(limit) {}

void LaneWork::run(const std::function<void()>& operation) {
  std::exception_ptr failure;
  try {
    operation();
  } catch (...) {
    failure = std::current_exception();
  }
  finish(failure);
  std::unique_lock lock(mutex_);
  looked_ = true;
  if (!future_) return;
  const auto self = c10::intrusive_ptr<LaneWork>::reclaim_copy(this);
  at::launch([self] { self->complete(*self->future_); });
}

void LaneWork::complete(c10::ivalue::Future& future) const {
  exception_ ? future.setError(exception_) : future.markCompleted(c10::IValue(outputs_));
}

bool LaneWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout > kNoTimeout ? timeout : limit_;
  const auto ended = [this] { return completed_; };
  std::unique_lock lock(mutex_);
  if (limit <= kNoTimeout) {
    cv_.wait(lock, ended);
  } else if (!cv_.wait_for(lock, limit, ended)) {
    throw Timeout(title_,
                  cat("operation #", sequence_, " of rank ", rank_, " has not ended after ", limit.count(),
                      " ms; it goes on until the group's own deadline"),
                  {});
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

std::vector<at::Tensor> LaneWork::result() {
  return outputs_;
}

c10::intrusive_ptr<c10::ivalue::Future> LaneWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  const auto future = future_;
  const bool late = looked_;  // else run() completes it
  lock.unlock();
  if (late) complete(*future);
  return future;
}

}  // namespace tesserae::comm
