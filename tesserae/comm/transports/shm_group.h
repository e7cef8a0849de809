#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/comm/group.h"
#include "tesserae/comm/liveness/liveness.h"
#include "tesserae/comm/liveness/watched.h"
#include "tesserae/comm/transports/shm_room.h"

namespace tesserae::comm {

/// A group whose members share a host: data go through memory that they all have mapped (shm_room.h), once in and once
/// out. Sums are formed from the blocks of the others where they lie, in the same order as over Gloo.
class ShmGroup final : public Group, private Watched {
 public:
  struct Options {
    std::chrono::milliseconds deadline;
    Liveness* liveness = nullptr;  ///< names lost ranks and enforces the deadline; outlives the group
    size_t block_bytes = 0;        ///< of a member's ring; 0: the default
    bool willing = true;           ///< false: this member does not share memory, and says so
  };

  /// Meets the other members through `store`, whose keys belong to this group alone. Null on all members if one of them
  /// cannot share memory with the others; `reason` then says why.
  static std::unique_ptr<ShmGroup> connect(const std::string& name, const std::vector<int>& members, int rank,
                                           const c10::intrusive_ptr<c10d::Store>& store, const Options& options,
                                           std::string& reason);
  ~ShmGroup() override;

  bool blocks_host() const override { return true; }
  at::Tensor share(int64_t bytes) override;
  bool can_share() const override { return true; }

 protected:
  void do_all_gather(const at::Tensor& buffer) override;
  void do_all_gather_to(const at::Tensor& output, const at::Tensor& input) override;
  void do_reduce_scatter(const at::Tensor& buffer, Reduction how) override;
  void do_reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Reduction how) override;
  void do_reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& buffer, double scale) override;
  void do_all_reduce(const at::Tensor& buffer, Reduction how) override;
  void do_broadcast(const at::Tensor& buffer, int root) override;
  void do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override;
  void do_barrier(std::string_view what) override;
  Wire travels_as(Wire /*asked*/) const override { return Wire::exact; }
  [[noreturn]] void rethrow(const std::string& what, const std::exception& cause) override;

 private:
  class Call;  // one verb from begin to end
  class Mail;  // the messages of one exchange to or from one member

  /// Piece i of a buffer is bytes [start[i], start[i + 1]).
  using Starts = std::vector<int64_t>;

  ShmGroup(std::string name, std::vector<int> members, int rank, std::unique_ptr<ShmRoom> room, Options options);
  Starts even_starts(const at::Tensor& buffer) const;
  /// `own`: this member's piece; copied to its place in `buffer` if it is not there.
  void gather_pieces(Call& call, const at::Tensor& buffer, const Starts& starts, const std::byte* own);
  void reduce_pieces(Call& call, const at::Tensor& buffer, const Starts& starts, std::byte* result, double scale = 1);
  void reduce_whole(Call& call, const at::Tensor& buffer);
  /// Throws if waiting is of no use any more.
  void check(std::chrono::steady_clock::time_point since) const;

  friend class TwoLevelGroup;  // for abort()
  const std::string& watched_name() const override { return name(); }
  const std::vector<int>& watched_members() const override { return members(); }
  std::chrono::milliseconds watched_deadline() const override { return options_.deadline; }
  bool notices_departures() const override { return false; }
  std::optional<Pending> pending() const override;
  void abort(const Verdict& verdict) override;

  const std::unique_ptr<ShmRoom> room_;
  const Options options_;
  uint64_t collectives_ = 0;

  mutable std::mutex mutex_;  // guards what the liveness channel looks at, below
  std::optional<Pending> pending_;
  std::optional<Verdict> verdict_;
};

}  // namespace tesserae::comm
