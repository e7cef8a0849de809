#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

namespace tesserae::comm {

/// One operation of a ProcessGroup from its submission to its end: what torch's callers hold. Thread-safe.
class LaneWork final : public c10d::Work {
 public:
  /// `title`: a literal, seen by the profiler and in errors. `limit`: how long wait() waits if it is not told; 0 or
  /// less: until the operation ends, which it does at the group's deadline.
  LaneWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs, uint64_t sequence, std::chrono::milliseconds limit);

  /// Runs the operation and keeps what it throws. Called once, on the lane.
  void run(const std::function<void()>& operation);

  /// Rethrows what the operation threw; throws Timeout if it does not end within `timeout`. It goes on in that case.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override;
  /// Completed with the outputs, or with the error. Callbacks do not run on the lane, so they may wait for other
  /// operations of the same group (communication hooks of DDP do).
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void complete(c10::ivalue::Future& future) const;

  const char* const title_;
  const std::vector<at::Tensor> outputs_;
  const uint64_t sequence_;
  const std::chrono::milliseconds limit_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // once somebody asked for it; guarded by mutex_, as looked_ is
  bool looked_ = false;                             // run() has, for a future
};

}  // namespace tesserae::comm
