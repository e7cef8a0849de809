#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <string>
#include <vector>

#include "tesserae/comm/group.h"
#include "tesserae/comm/liveness/liveness.h"
#include "tesserae/comm/liveness/watched.h"

namespace tesserae::comm {

/// A group over any c10d backend that has in-place all-gather and reduce-scatter on one buffer: NCCL, MPI, and groups
/// that were made in Python.
///
/// A backend for CUDA runs its collectives on the current stream and never blocks the host: lanes are streams already,
/// and torch has 32 more for all of its groups, so that the 33rd would be in line behind the first. Messages have no
/// such way: they run on one of those, and what comes next on the current stream waits for them. A deadline on a device
/// is the backend's own (NCCL's watchdog, set to ours by make_nccl); the liveness channel aborts it when a member is
/// lost, and every verb after that throws PeerLost. A verb that was running then ends without a result, and so does one
/// that failed or took too long. Nothing that it returns reports that: require_intact() does.
class C10dGroup final : public Group, private Watched {
 public:
  struct Options {
    std::chrono::milliseconds deadline{300'000};
    bool blocks_host = false;
    Liveness* liveness = nullptr;  ///< outlives the group
    /// The backend connects now, while all members are here. NCCL would otherwise do so in the first verb, where all
    /// must wait for each other: for ever, if that is an exchange in which not all take part. For a backend that is new
    /// and bound to its device.
    bool connects = false;
  };

  C10dGroup(std::string name, std::vector<int> members, c10::intrusive_ptr<c10d::Backend> backend, Options options);
  ~C10dGroup() override;

  bool blocks_host() const override { return options_.blocks_host; }
  /// Of any rank of the job that is lost: what came from a member may have come from that one.
  void require_intact() override;
  void close() override;

 protected:
  void do_all_gather(const at::Tensor& buffer) override;
  void do_reduce_scatter(const at::Tensor& buffer, Reduction how) override;
  void do_all_reduce(const at::Tensor& buffer, Reduction how) override;
  void do_broadcast(const at::Tensor& buffer, int root) override;
  void do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override;
  void do_barrier(std::string_view what) override;
  [[noreturn]] void rethrow(const std::string& what, const std::exception& cause) override;

 private:
  template <class Start>
  void run(const Start& start);
  /// Throws what the backend says has failed on a device, if it says so.
  void require_no_error(const std::string& what);
  /// Whether the backend may use streams of its own. One on the CPU is not asked: what it does is async to its wait().
  bool has_own_streams() const { return options_.blocks_host; }

  const std::string& watched_name() const override { return name(); }
  const std::vector<int>& watched_members() const override { return members(); }
  std::chrono::milliseconds watched_deadline() const override { return options_.deadline; }
  /// Whether a verb still runs on the device is not known: one that has just begun, so that it ends where ranks give
  /// up.
  std::optional<Pending> pending() const override {
    if (options_.blocks_host) return std::nullopt;
    return Pending{.sequence = 0, .text = {}, .since = std::chrono::steady_clock::now()};
  }
  void abort(const Verdict& verdict) override;

  c10::intrusive_ptr<c10d::Backend> backend_;
  Options options_;
  std::mutex mutex_;
  std::optional<Verdict> verdict_;
  std::atomic<bool> tells_errors_;  // the backend does; lanes and the training thread ask
};

}  // namespace tesserae::comm
