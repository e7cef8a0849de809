#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/comm/group.h"
#include "tesserae/comm/liveness/liveness.h"
#include "tesserae/comm/liveness/watched.h"

namespace tesserae::comm {

using GlooDevice = std::shared_ptr<::gloo::transport::Device>;

/// The network interface that Gloo uses: loopback if all ranks share this host, else the one named by
/// GLOO_SOCKET_IFNAME, else the one that this host's name resolves to.
GlooDevice make_gloo_device(bool one_host);

/// torch's own group over Gloo, for what it does better than we: messages that match by tag and come at any time.
c10::intrusive_ptr<c10d::Backend> make_gloo_messages(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                     bool one_host, std::chrono::milliseconds timeout);

/// Of a group of torch's over Gloo, after one of its operations failed: what blocks there fails, here and on members
/// that wait for this one. Its destructor would wait for that. No operation is called afterwards. Any other backend
/// stays as it is.
void close_gloo_connections(c10d::Backend& backend);

/// A group over Gloo's TCP connections, with collectives of our own on Gloo's point-to-point messages: those are run by
/// Gloo's device thread alone, land in place, and leave the choice of algorithm and of summation order to us.
///
/// [Note: fingerprints] Each message's tag is a fingerprint of the operation (verb, sequence, dtype, size). Members
/// that disagree never match, so nothing is written where it does not belong; the liveness channel finds out who
/// disagrees.
class GlooGroup final : public Group, private Watched {
 public:
  struct Options {
    std::chrono::milliseconds connect_deadline;
    std::chrono::milliseconds deadline;
    GlooDevice device;
    Liveness* liveness = nullptr;  ///< names lost ranks and enforces the deadline; outlives the group
    int64_t chunk_bytes = 0;       ///< of the pipelined reduce-scatter; 0: the default
  };

  /// Connects all members through `store`, whose keys belong to this group alone.
  GlooGroup(std::string name, std::vector<int> members, int rank, const c10::intrusive_ptr<c10d::Store>& store,
            Options options);
  ~GlooGroup() override;

  bool blocks_host() const override { return true; }

 protected:
  void do_all_gather(const at::Tensor& buffer) override;
  void do_reduce_scatter(const at::Tensor& buffer, Reduction how) override;
  void do_all_reduce(const at::Tensor& buffer, Reduction how) override;
  void do_broadcast(const at::Tensor& buffer, int root) override;
  void do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override;
  void do_barrier(std::string_view what) override;
  void do_packed_exchange(const std::string& verb, const at::Tensor& buffer, const std::vector<Message>& sends,
                          const std::vector<Message>& receives) override;
  [[noreturn]] void rethrow(const std::string& what, const std::exception& cause) override;

 private:
  struct Transfer {
    c10::intrusive_ptr<c10d::Work> work;
    int peer = 0;
  };
  class Call;  // one verb from begin to end

  /// Piece i of a buffer is elements [start[i], start[i + 1]).
  using Starts = std::vector<int64_t>;
  void gather_pieces(Call& call, const at::Tensor& flat, const Starts& starts);
  void reduce_pieces(Call& call, const at::Tensor& flat, const Starts& starts, Reduction how, bool then_gather);
  void reduce_whole(Call& call, const at::Tensor& flat, Reduction how);
  Starts even_starts(int64_t elements) const;
  at::Tensor scratch(int64_t elements, at::ScalarType dtype);

  friend class TwoLevelGroup;  // for abort()
  const std::string& watched_name() const override { return name(); }
  const std::vector<int>& watched_members() const override { return members(); }
  std::chrono::milliseconds watched_deadline() const override { return options_.deadline; }
  std::optional<Pending> pending() const override;
  void check_connections() override;
  void abort(const Verdict& verdict) override;

  Options options_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  at::Tensor scratch_;
  uint64_t collectives_ = 0;

  mutable std::mutex mutex_;  // guards what the liveness channel looks at, below
  Call* call_ = nullptr;
  std::vector<Transfer> transfers_;
  std::optional<Verdict> verdict_;
};

}  // namespace tesserae::comm
