#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/group.h"
#include "tesserae/comm/lane.h"
#include "tesserae/mesh/world.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tesserae::comm {

class GroupTable;

/// What the backend of a device's group is made of.
struct DeviceGroup {
  std::vector<int> members;               ///< as the ranks joined (mesh::World::launcher_rank)
  int rank = 0;                           ///< index of this process in `members`
  c10::Device device = c10::kCPU;         ///< where this process's tensors are
  std::chrono::milliseconds deadline{0};  ///< of each operation
};

/// How ranks meet, and what carries their bytes. Every rank gives the same, except `host`.
struct FabricOptions {
  /// "gloo"; "shm": memory among ranks of a host, Gloo between hosts; "nccl"; "staged": shm through the host, for any
  /// device (ranks may share one); "null"; "auto": nccl for CUDA where this build has it, for other devices, and there,
  /// what make_backend makes, else shm.
  std::string backend = "auto";
  c10::Device device = c10::kCPU;                      ///< where the tensors of this rank are that travel
  std::chrono::milliseconds connect_deadline{60'000};  ///< how long ranks wait for each other to come
  std::chrono::milliseconds deadline{300'000};         ///< of each verb of a group, unless the call gives one
  bool names_process = true;                           ///< lines of the log carry the rank in this fabric
  std::string host;  ///< label of the machine of this rank; empty: its own identity (tests place ranks as they like)
  int epoch = 0;     ///< how often the job's ranks have met before (Fabric::reconnect): who is of another does not meet
  /// Asked while ranks meet, every so often. True: this meeting will not take place, and a CommError says so.
  std::function<bool()> cancelled = {};
  /// Collective over its members: a backend whose work is ordered by the current stream of the device, as NCCL's is.
  /// For devices that device_transport() does not know, or this build has no transport for: torch's registry has theirs
  /// (Python). What it throws is what Fabric::group throws, unless a member was lost meanwhile.
  std::function<c10::intrusive_ptr<c10d::Backend>(const DeviceGroup& group)> make_backend = {};
};

/// What a lane carries. Groups are made for one lane, so that lanes never wait for each other. `copies`: what is sent
/// to other hosts in case that this one is lost.
enum class Traffic { gather, reduce, control, copies };
/// Each of them.
inline constexpr std::array all_traffic = {Traffic::gather, Traffic::reduce, Traffic::control, Traffic::copies};

/// The live connections of this rank in a job: its groups, its lanes and the liveness channel.
///
/// One per job and process (or thread, with run_local); shared by all engines of the process. group() and lane() are
/// called from the training thread. Destroying the fabric says goodbye, so that peers do not take this rank for lost.
class Fabric {
 public:
  /// Meets the other ranks at `world.launch()`'s address, learns who shares a host, orders the ranks by host and starts
  /// the liveness channel. Throws Timeout naming the ranks that did not come within connect_deadline.
  static std::shared_ptr<Fabric> connect(const mesh::World& world, const FabricOptions& options = {});

  /// The same for `size` ranks that share a store already, this process being `rank` among them: processes that met
  /// through torch.distributed. `served`: the store does not end with rank 0. The store is kept.
  static std::shared_ptr<Fabric> join(c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool served,
                                      const FabricOptions& options = {});

  /// A fabric for `world` that moves nothing: measures cost and schedules of any number of ranks; proves no numbers.
  static std::shared_ptr<Fabric> null(const mesh::World& world, c10::Device device = c10::kCPU);

  virtual ~Fabric() = default;

  /// Says goodbye early, for a process that is about to end while its fabric still has owners: peers do not take this
  /// rank for lost. No verb is called afterwards.
  virtual void leave() {}

  /// After a verb threw a CommError: leaves what is broken, aborts what still blocks there, and meets the ranks of the
  /// job again, those of the same epoch: this process with its values, and a new one in place of each that was lost.
  /// All groups and lanes are made anew: who holds one asks again. Those of before are of no use, but stay until
  /// forget_broken(). From the training thread. Throws what connect() throws, CommError if ranks are not where they
  /// were, InvalidArgument where there is nobody to meet.
  virtual void reconnect(int epoch);
  /// Lets go of the groups and lanes of before reconnect(): nobody may hold one any more.
  virtual void forget_broken() {}
  /// Of the connections that there are. Members of a group of another epoch are not to be asked anything.
  virtual int epoch() const { return 0; }

  virtual const mesh::World& world() const = 0;  ///< the ranks, and the hosts that they are on
  virtual c10::Device device() const = 0;        ///< where tensors that travel are
  int rank() const { return world().rank(); }    ///< this process, in [0, size())
  int size() const { return world().size(); }    ///< how many ranks the job has

  /// The group of these job ranks (in this order) on that lane; made at the first call, which all members make in the
  /// same order of groups, and kept. A group of one is always there and its verbs do nothing.
  virtual Group& group(const std::vector<int>& members, Traffic traffic) = 0;
  /// The same for who lets go of it some day: it is there while somebody holds what is returned, and then until
  /// release_unused(). What group() was ever asked for stays.
  std::shared_ptr<Group> borrow(const std::vector<int>& members, Traffic traffic);
  /// Ends the borrowed groups of these ranks that none of their members holds any more, on all members in the same
  /// order; borrow() makes them anew. Returns how many ended here. Collective, from the training thread; nothing may be
  /// in flight on such a group (Lane::drain).
  int release_unused();
  /// How many groups this process has now; those of one rank count.
  int group_count() const;
  /// All ranks in order, on the control lane: barriers, agreement, scalars. Used from the training thread directly.
  Group& everyone();

  /// The lane for that traffic; owned by the fabric, made at the first call. Tasks run in the order of submission.
  virtual Lane& lane(Traffic traffic) = 0;

  /// For who computes, and waits for nobody meanwhile: throws PeerLost if one of these ranks has ended without a
  /// goodbye, since what comes of it is of no use then. Costs as good as nothing. From the threads that compute.
  void require_alive(const Label& label) const;

  /// The store through which the ranks of the job met, by a connection of the caller's own, restricted to keys below
  /// `prefix`: for what they tell each other beside training. Null where they did not meet (one process, null, ranks
  /// that are threads). Used by one thread at a time, whichever; it may outlive the fabric.
  virtual c10::intrusive_ptr<c10d::Store> own_store(const std::string& prefix) const;

  /// Sum over all groups.
  virtual Counters counters() const = 0;

 protected:
  /// Where the groups of this process are; null: borrow() is group().
  virtual GroupTable* table() const { return nullptr; }
  /// Job ranks of this fabric that have ended without a goodbye, the first in front.
  virtual std::vector<int> lost() const { return {}; }
  static GroupTable* table_of(const Fabric& other) { return other.table(); }     ///< for fabrics made of others
  static std::vector<int> lost_of(const Fabric& other) { return other.lost(); }  ///< the same

 private:
  Group* everyone_ = nullptr;
  int everyone_epoch_ = 0;
};

/// Runs `body` as `ranks` threads of this process, each with a fabric whose groups really move data through memory.
/// A rank that threw makes its peers throw PeerLost. After all threads ended, rethrows the first exception by rank, one
/// that is no PeerLost before one that is.
void run_local(int ranks, const std::function<void(Fabric&)>& body,
               std::chrono::milliseconds deadline = std::chrono::minutes(5));

}  // namespace tesserae::comm
