#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/comm/group_table.h"
#include "tesserae/comm/liveness/liveness.h"
#include "tesserae/comm/rendezvous.h"
#include "tesserae/comm/transports/gloo_group.h"
#include "tesserae/comm/transports/shm_group.h"
#include "tesserae/comm/transports/two_level_group.h"

namespace tesserae::comm {

/// What a rank has of its job from one meeting to the next: the liveness channel, groups and lanes. A fabric has one at
/// a time (Fabric::reconnect).
class Connections {
 public:
  using StorePtr = c10::intrusive_ptr<c10d::Store>;

  /// The backend that is FabricOptions::make_backend.
  static constexpr std::string_view made_backend = "made";

  /// Meets the others. `backend`: gloo, shm, nccl, staged or made; `may_share`: false once memory could not be shared.
  /// Throws what Fabric::connect does.
  Connections(Rendezvous rendezvous, const FabricOptions& options, const std::string& backend, bool may_share);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  void leave();  ///< see Fabric::leave
  /// This process goes on without them: nothing blocks in them any more when it returns.
  void give_up();

  const mesh::World& world() const { return world_; }
  bool may_share() const { return shm_; }
  StorePtr store() const { return rendezvous_.store(""); }
  StorePtr own_store(const std::string& prefix) const { return rendezvous_.own_connection(prefix); }
  StorePtr watched_store(const std::string& prefix);  ///< meeting_store.h has what it is for, and missing_ranks()
  std::vector<int> missing_ranks() const;
  std::vector<int> lost_ranks() const { return liveness_->lost(); }
  Group& group(const std::vector<int>& members, Traffic traffic);
  Lane& lane(Traffic traffic) { return table_.lane(traffic); }
  Counters counters() const { return table_.counters(); }
  GroupTable& table() { return table_; }

 private:
  mesh::World meet();
  // The job rank of the process that serves the store.
  int server() const;
  MembersByHost hosts_of(const std::vector<int>& members) const;
  // What the members tell each other while the group is made.
  StorePtr store_of(const std::string& name, const std::vector<int>& members, const std::string& prefix);
  std::unique_ptr<Group> make_group(const std::string& name, const std::vector<int>& members, int rank,
                                    Traffic traffic);
  // Of tensors on the CPU.
  std::unique_ptr<Group> make_host_group(const std::string& name, const std::vector<int>& members, int rank,
                                         Traffic traffic);
  // Of a group that could not be made: throws PeerLost if a member is gone, whose news may take a moment.
  void require_members(const std::string& name, const std::vector<int>& members) const;
  // Null if the members do not share a host, or cannot share memory.
  std::unique_ptr<ShmGroup> make_shm_group(const std::string& name, const std::vector<int>& members, int rank,
                                           std::chrono::milliseconds deadline);
  std::unique_ptr<GlooGroup> make_gloo_group(std::string name, const std::vector<int>& members, int rank,
                                             const StorePtr& store, Traffic traffic);
  // Puts a near group beside the flat one, where that saves bytes between hosts and each host has memory to share.
  std::unique_ptr<Group> with_two_levels(std::string name, std::unique_ptr<GlooGroup> flat, MembersByHost hosts);
  // NCCL's, or what make_backend makes.
  std::unique_ptr<Group> make_device_group(std::string name, const std::vector<int>& members, int rank,
                                           const StorePtr& store);

  FabricOptions options_;
  const bool made_;
  const bool on_streams_;  // groups are those of a device, which order their work by its streams
  const bool staged_;
  const bool wants_shm_;
  bool shm_;  // as long as sharing memory works
  Rendezvous rendezvous_;
  StorePtr signs_of_life_;
  mesh::World world_;
  // Two levels only then: groups that reduce the same numbers on other ranks (tensor parallelism) must all do it in the
  // same order.
  bool even_hosts_;
  bool serves_;
  bool broken_ = false;
  std::shared_ptr<TimeLimiter> questions_ = std::make_shared<TimeLimiter>();  // to the store, while groups are made
  std::shared_ptr<Liveness> liveness_;  // also of what is left behind when a group could not be made
  std::map<Traffic, GlooDevice> devices_;
  GroupTable table_;
};

}  // namespace tesserae::comm
