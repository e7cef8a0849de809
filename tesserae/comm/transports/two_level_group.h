#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/comm/group.h"
#include "tesserae/comm/liveness/liveness.h"
#include "tesserae/comm/liveness/watched.h"
#include "tesserae/comm/transports/gloo_group.h"
#include "tesserae/comm/transports/shm_group.h"

namespace tesserae::comm {

/// Where the members of a group are: by host, in the order of members.
using MembersByHost = std::vector<std::vector<int>>;

/// Groups the member indices by `host_of[member]`.
MembersByHost members_by_host(const std::vector<int>& host_of);

/// True if two levels save bytes between hosts: several hosts, with as many members on each, and more than one.
bool has_two_levels(const MembersByHost& hosts);

/// True if members alternate between hosts, which has_two_levels(): counterparts lie side by side. So do those of
/// gradients and masters where the ranks of a host share the parameters.
bool alternate(const MembersByHost& hosts);

/// A group over hosts: bytes cross between hosts once for each element, shared evenly by the members of a host, and are
/// multiplied or summed inside it. A flat group sends a piece to every member of another host.
///
/// Member i of a host and member i of another are counterparts. [Note: two levels]
///  each collective: 0. members of a host, then counterparts tell each other what they are about to do.
///  all-gather:      1. counterparts exchange their own pieces;
///                   2. for each host, its pieces are gathered among the members of this one.
///  reduce-scatter:  1. for each host, its pieces are reduced among the members of this one;
///                   2. counterparts exchange what they then have for each other;
///                   3. each adds, in the order rank's host, the host before it, ...
///  Members that alternate between hosts have one inner collective instead: what a member of a host does for all hosts
///  lies in one piece.
///  all-reduce:      reduce-scatter, then all-gather; what is small goes flat, where a message costs its latency.
///  broadcast:       1. the root to its counterparts; 2. each inside its host.
/// What crosses in gathers and reductions is packed if the caller allows it (wire.h); what is summed inside is not.
/// Messages are flat: they must not wait for each other, whoever they are for.
class TwoLevelGroup final : public Group, private Watched {
 public:
  /// `flat`: all members, in this order; `near`: the members of this host, in this order.
  /// `liveness` outlives the group.
  TwoLevelGroup(std::string name, std::unique_ptr<GlooGroup> flat, std::unique_ptr<ShmGroup> near, MembersByHost hosts,
                std::chrono::milliseconds deadline, Liveness& liveness);
  ~TwoLevelGroup() override;

  bool blocks_host() const override { return true; }

 protected:
  void do_all_gather(const at::Tensor& buffer) override;
  void do_reduce_scatter(const at::Tensor& buffer, Reduction how) override;
  void do_all_reduce(const at::Tensor& buffer, Reduction how) override;
  void do_broadcast(const at::Tensor& buffer, int root) override;
  void do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override;
  void do_barrier(std::string_view what) override;
  void do_packed_all_gather(const at::Tensor& buffer, Wire wire) override;
  void do_packed_reduce_scatter(const at::Tensor& buffer, Reduction how, Wire wire) override;
  [[noreturn]] void rethrow(const std::string& what, const std::exception& cause) override;

 private:
  class Call;  // one verb from begin to end

  int hosts() const { return static_cast<int>(hosts_.size()); }
  int counterpart(int host) const { return hosts_[static_cast<size_t>(host)][static_cast<size_t>(near_->rank())]; }
  void agree(const std::string& text);
  void gather(const at::Tensor& flat, Wire wire = Wire::exact);
  void reduce(const at::Tensor& flat, Reduction how, Wire wire = Wire::exact);
  /// The pieces of the members of `host` as one buffer: where they lie, if they lie there side by side, else a copy.
  at::Tensor pieces_of(int host, const at::Tensor& flat, bool& copied) const;
  /// This member's of them, reduced among the members of this host.
  at::Tensor reduced_inside(int host, const at::Tensor& flat, Reduction how);

  const std::string& watched_name() const override { return name(); }
  const std::vector<int>& watched_members() const override { return members(); }
  std::chrono::milliseconds watched_deadline() const override { return deadline_; }
  std::optional<Pending> pending() const override;
  void abort(const Verdict& verdict) override;

  std::unique_ptr<GlooGroup> flat_;
  std::unique_ptr<ShmGroup> near_;
  MembersByHost hosts_;
  bool alternate_;
  std::chrono::milliseconds deadline_;
  Liveness& liveness_;
  int host_ = 0;  // this member's
  uint64_t collectives_ = 0;

  mutable std::mutex mutex_;  // guards what the liveness channel looks at, below
  std::optional<Pending> pending_;
  std::optional<Verdict> verdict_;
};

}  // namespace tesserae::comm
