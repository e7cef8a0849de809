#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "tesserae/comm/connections.h"
#include "tesserae/comm/device_transport.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/comm/give_up.h"
#include "tesserae/comm/meeting_store.h"
#include "tesserae/comm/rank_list.h"
#include "tesserae/comm/rendezvous.h"
#include "tesserae/comm/transports/nccl.h"
#include "tesserae/os/fork.h"

namespace tesserae::comm {

namespace {

const std::string kMadeBackend(Connections::made_backend);

std::string choose_backend(const FabricOptions& options, int ranks) {
  const std::string_view of_device = device_transport(options.device.type());
  if (options.backend == "auto") {
    if (options.device.is_cpu()) return "shm";
    const bool built = of_device != "nccl" || has_nccl();
    if (!of_device.empty() && (built || !options.make_backend)) return std::string(of_device);
    if (options.make_backend) return kMadeBackend;
    if (ranks == 1) return "null";
    throw InvalidArgument("Fabric::connect",
                          cat("nothing moves tensors between ranks on ", options.device, ": of devices other than the ",
                              "CPU and CUDA, Python alone knows the backends (torch.distributed's registry)"));
  }
  if ((options.backend == "gloo" || options.backend == "shm") && !options.device.is_cpu()) {
    throw InvalidArgument("Fabric::connect",
                          cat("backend ", options.backend, " moves CPU tensors, the device is ", options.device));
  }
  if (options.backend == "staged" && options.device.is_cpu()) {
    throw InvalidArgument("Fabric::connect", "backend staged moves tensors of an accelerator, the device is cpu");
  }
  if (options.backend == "nccl" && of_device != "nccl") {
    throw InvalidArgument("Fabric::connect", cat("backend nccl moves CUDA tensors, the device is ", options.device));
  }
  const auto known = {"gloo", "shm", "nccl", "staged", "null"};
  if (std::find(known.begin(), known.end(), options.backend) != known.end()) return options.backend;
  throw InvalidArgument("Fabric::connect",
                        cat("backend \"", options.backend, "\": known are auto, gloo, shm, nccl, staged and null"));
}

/// Whether two meetings gave every rank the same number and the same host.
bool same_places(const mesh::World& a, const mesh::World& b) {
  bool same = a.size() == b.size() && a.rank() == b.rank();
  for (int rank = 0; same && rank < a.size(); ++rank) {
    same = a.launcher_rank(rank) == b.launcher_rank(rank) && a.host(rank) == b.host(rank);
  }
  return same;
}

class ConnectedFabric final : public Fabric {
 public:
  using MakeRendezvous = std::function<Rendezvous(int epoch)>;

  /// In a child that was forked it is never destroyed: there are no threads to join, and sockets are the parent's.
  static std::shared_ptr<Fabric> make(MakeRendezvous rendezvous, const FabricOptions& options,
                                      const std::string& backend) {
    const auto end = [](ConnectedFabric* fabric) {
      if (!fabric->made_.in_child()) delete fabric;
    };
    return {new ConnectedFabric(std::move(rendezvous), options, backend), end};
  }

  ConnectedFabric(MakeRendezvous rendezvous, const FabricOptions& options, const std::string& backend)
      : options_(options),
        backend_(backend),
        rendezvous_(std::move(rendezvous)),
        epoch_(options.epoch),
        now_(std::make_unique<Connections>(rendezvous_(epoch_), options_, backend_, /*may_share=*/true)),
        world_(now_->world()) {}

  void leave() override {
    if (!made_.in_child() && now_) now_->leave();
  }

  void reconnect(int epoch) override {
    if (made_.in_child()) throw ForkedChild("Fabric::reconnect");
    give_up();
    epoch_ = epoch;
    now_ = std::make_unique<Connections>(rendezvous_(epoch), options_, backend_, may_share_);
    if (same_places(world_, now_->world())) return;
    throw CommError("Fabric::reconnect",
                    cat("in epoch ", epoch, " the ranks of the job are not on the hosts where they ",
                        "were: start the job again from its last checkpoint"));
  }
  void give_up() {
    if (!now_) return;
    now_->give_up();
    may_share_ = now_->may_share();
    if (!store_) store_ = now_->store();
    broken_.push_back(std::move(now_));  // whoever holds a group or a lane may still end it
  }
  void forget_broken() override { broken_.clear(); }
  int epoch() const override { return epoch_; }

  const mesh::World& world() const override { return world_; }
  c10::Device device() const override { return options_.device; }
  Group& group(const std::vector<int>& members, Traffic traffic) override {
    if (made_.in_child()) throw ForkedChild("Fabric::group");
    return now().group(members, traffic);
  }
  Lane& lane(Traffic traffic) override { return now().lane(traffic); }
  c10::intrusive_ptr<c10d::Store> own_store(const std::string& prefix) const override {
    return now().own_store(prefix);
  }
  c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix) const { return now().watched_store(prefix); }
  std::vector<int> missing_ranks() const { return now_ ? now_->missing_ranks() : std::vector<int>(); }
  Counters counters() const override { return now_ ? now_->counters() : Counters(); }

 protected:
  GroupTable* table() const override { return now_ ? &now_->table() : nullptr; }
  std::vector<int> lost() const override { return now_ ? now_->lost_ranks() : std::vector<int>(); }

 private:
  Connections& now() const {
    if (now_) return *now_;
    throw CommError("Fabric::group", cat("the ranks of epoch ", epoch_, " have not met"));
  }

  const os::ForkGuard made_;
  const FabricOptions options_;
  const std::string backend_;
  const MakeRendezvous rendezvous_;
  int epoch_;
  bool may_share_ = true;
  Connections::StorePtr store_;  // of the first meeting: this process may serve it for the others
  std::vector<std::unique_ptr<Connections>> broken_;
  std::unique_ptr<Connections> now_;
  const mesh::World world_;
};

}  // namespace

std::shared_ptr<Fabric> Fabric::connect(const mesh::World& world, const FabricOptions& options) {
  const std::string backend = choose_backend(options, world.size());
  // A job of one process has nobody to meet, nobody to lose and nothing to move.
  if (backend == "null" || world.size() == 1) return null(world, options.device);
  const auto rendezvous = [world, deadline = options.connect_deadline](int epoch) {
    return Rendezvous(world, deadline, epoch);
  };
  return ConnectedFabric::make(rendezvous, options, backend);
}

std::shared_ptr<Fabric> Fabric::join(c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool served,
                                     const FabricOptions& options) {
  const mesh::World world = mesh::World::joined(rank, size, served);
  const std::string backend = choose_backend(options, size);
  if (backend == "null" || size == 1) return null(world, options.device);
  const auto rendezvous = [world, store = std::move(store), deadline = options.connect_deadline](int epoch) {
    return Rendezvous(world, store, deadline, epoch);
  };
  return ConnectedFabric::make(rendezvous, options, backend);
}

void give_up(Fabric& fabric) {
  if (auto* const connected = dynamic_cast<ConnectedFabric*>(&fabric)) connected->give_up();
}

c10::intrusive_ptr<c10d::Store> watched_store(Fabric& fabric, const std::string& prefix) {
  const auto* const connected = dynamic_cast<ConnectedFabric*>(&fabric);
  return connected != nullptr ? connected->watched_store(prefix) : nullptr;
}

std::vector<int> missing_ranks(const Fabric& fabric) {
  const auto* const connected = dynamic_cast<const ConnectedFabric*>(&fabric);
  return connected != nullptr ? connected->missing_ranks() : std::vector<int>();
}

void Fabric::reconnect(int /*epoch*/) {
  throw InvalidArgument("Fabric::reconnect", cat("a fabric of ", size(), size() == 1 ? " rank" : " ranks",
                                                 " that did not meet through a store has nobody to meet again"));
}

void Fabric::require_alive(const Label& label) const {
  if (std::vector<int> ranks = lost(); !ranks.empty()) {
    const std::string message =
        cat("unit ", label.unit, ", step ", label.step, ": lost ", rank_list(ranks), " while this one computed");
    throw PeerLost("Fabric", message, std::move(ranks));
  }
}

c10::intrusive_ptr<c10d::Store> Fabric::own_store(const std::string& /*prefix*/) const {
  return {};
}

Group& Fabric::everyone() {
  if (!everyone_ || everyone_epoch_ != epoch()) {
    std::vector<int> all(static_cast<size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    everyone_ = &group(all, Traffic::control);
    everyone_epoch_ = epoch();
  }
  return *everyone_;
}

}  // namespace tesserae::comm
