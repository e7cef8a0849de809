#include "tesserae/comm/connections.h"

#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tesserae/base/log.h"
#include "tesserae/comm/liveness/process_waits.h"
#include "tesserae/comm/liveness/watched_store.h"
#include "tesserae/comm/transports/c10d_group.h"
#include "tesserae/comm/transports/nccl.h"
#include "tesserae/comm/transports/staged_group.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/host.h"

namespace tesserae::comm {
namespace {

// Of the members of one host within a larger group: that group's own deadline passes first, and knows more.
constexpr std::chrono::seconds kNearMargin{12};
// A connection breaks before the end of the process behind it is known.
constexpr std::chrono::milliseconds kNewsOfALoss{1500};

// How long the rank that serves the store stays for the others, who may still want to know why they failed.
constexpr std::chrono::seconds kStay{10};

bool all_hosts_alike(const mesh::World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.hosts()), 0);
  for (int rank = 0; rank < world.size(); ++rank) ++ranks[static_cast<size_t>(world.host(rank))];
  return std::all_of(ranks.begin(), ranks.end(), [&](int count) { return count == ranks.front(); });
}

// What make_backend threw: the caller's own, who knows its type.
struct UsersFailure {
  std::exception_ptr thrown;
};

c10::intrusive_ptr<c10d::Backend> users_backend(const FabricOptions& options, const DeviceGroup& group) {
  try {
    return options.make_backend(group);
  } catch (const Error&) {
    throw;
  } catch (...) {
    throw UsersFailure{std::current_exception()};
  }
}

}  // namespace

Connections::Connections(Rendezvous rendezvous, const FabricOptions& options, const std::string& backend,
                         bool may_share)
    : options_(options),
      made_(backend == made_backend),
      on_streams_(made_ || backend == "nccl"),
      staged_(backend == "staged"),
      wants_shm_(backend == "shm" || staged_),
      shm_(wants_shm_ && may_share),
      rendezvous_(std::move(rendezvous)),
      signs_of_life_(rendezvous_.own_connection("liveness")),
      world_(meet()),
      even_hosts_(all_hosts_alike(world_)),
      serves_(rendezvous_.world().launch().rank == 0 && !rendezvous_.world().launch().store_is_served),
      liveness_(std::make_shared<Liveness>(world_, signs_of_life_, server())),
      table_(world_.rank(), world_.size(), on_streams_ || staged_ ? Lane::Kind::stream : Lane::Kind::threaded,
             options.device) {
  if (on_streams_) waits_unseen();
  if (options.names_process) set_log_rank(world_.rank());
}

Connections::~Connections() {
  // The goodbye comes before the sockets close, so that nobody takes this rank for lost; and before the lanes end, so
  // that what they still wait for (nobody may come, if this rank ends because of an error) is aborted in a while.
  liveness_->leave();
  table_.clear();
  if (serves_ && !broken_) liveness_->wait_for_others(kStay);
}

void Connections::leave() {
  liveness_->leave();
  if (serves_) liveness_->wait_for_others(kStay);
}

void Connections::give_up() {
  broken_ = true;
  liveness_->give_up();
  table_.drain();
}

Group& Connections::group(const std::vector<int>& members, Traffic traffic) {
  return table_.group(members, traffic, [&](std::string name, const std::vector<int>& members, int rank) {
    liveness_->take_time_out();
    try {
      return make_group(name, members, rank, traffic);
    } catch (const Error&) {
      throw;
    } catch (const UsersFailure& users) {
      require_members(name, members);
      std::rethrow_exception(users.thrown);
    } catch (const std::exception& failure) {
      require_members(name, members);
      if (const auto late = liveness_->take_time_out()) throw *late;
      throw CommError("Fabric::group", cat(name, " is not made: ", reason_of(failure)));
    }
  });
}

mesh::World Connections::meet() {
  rendezvous_.introduce(signs_of_life_);
  return rendezvous_.meet(options_.host.empty() ? os::host_identity() : options_.host, options_.cancelled);
}

// The job rank of the process that serves the store.
int Connections::server() const {
  if (world_.launch().store_is_served) return -1;
  int rank = 0;
  while (world_.launcher_rank(rank) != 0) ++rank;
  return rank;
}

MembersByHost Connections::hosts_of(const std::vector<int>& members) const {
  std::vector<int> host_of;
  for (const int member : members) host_of.push_back(world_.host(member));
  return members_by_host(host_of);
}

// What the members tell each other while the group is made.
Connections::StorePtr Connections::store_of(const std::string& name, const std::vector<int>& members,
                                            const std::string& prefix) {
  return c10::make_intrusive<WatchedStore>(
      WatchedStore::Party{name, members, options_.connect_deadline, liveness_, questions_}, prefix + name,
      rendezvous_.store(""));
}

Connections::StorePtr Connections::watched_store(const std::string& prefix) {
  std::vector<int> all(static_cast<size_t>(world_.size()));
  std::iota(all.begin(), all.end(), 0);
  return store_of("the job's group", all, prefix);
}

std::vector<int> Connections::missing_ranks() const {
  std::vector<int> ranks;
  for (const int rank : liveness_->missing()) ranks.push_back(world_.launcher_rank(rank));
  return ranks;
}

std::unique_ptr<Group> Connections::make_group(const std::string& name, const std::vector<int>& members, int rank,
                                               Traffic traffic) {
  if (on_streams_) return make_device_group(name, members, rank, store_of(name, members, "group/"));
  auto group = make_host_group(name, members, rank, traffic);
  return staged_ ? std::make_unique<StagedGroup>(std::move(group), options_.device) : std::move(group);
}

std::unique_ptr<Group> Connections::make_host_group(const std::string& name, const std::vector<int>& members, int rank,
                                                    Traffic traffic) {
  const auto store = store_of(name, members, "group/");
  if (auto group = make_shm_group(name, members, rank, options_.deadline)) return group;
  const auto hosts = hosts_of(members);
  if (!wants_shm_ || !even_hosts_ || !has_two_levels(hosts)) {
    return make_gloo_group(name, members, rank, store, traffic);
  }
  // A name of its own: the liveness channel knows groups by their names.
  auto flat = make_gloo_group(name + ".flat", members, rank, store, traffic);
  return with_two_levels(name, std::move(flat), hosts);
}

void Connections::require_members(const std::string& name, const std::vector<int>& members) const {
  for (const os::Deadline news(kNewsOfALoss); !news.passed(); os::sleep_for(std::chrono::milliseconds(20))) {
    if (auto gone = liveness_->gone_among(members); !gone.empty()) throw lost_while_made(name, std::move(gone));
  }
}

// Null if the members do not share a host, or cannot share memory.
std::unique_ptr<ShmGroup> Connections::make_shm_group(const std::string& name, const std::vector<int>& members,
                                                      int rank, std::chrono::milliseconds deadline) {
  const std::vector<int>& near = world_.host_ranks(world_.rank());
  const auto is_near = [&near](int member) { return std::find(near.begin(), near.end(), member) != near.end(); };
  if (!wants_shm_ || !std::all_of(members.begin(), members.end(), is_near)) return nullptr;
  std::string reason;
  // Who could not once tells the others, who may not have been there.
  auto group = ShmGroup::connect(name, members, rank, store_of(name, members, "shm/"),
                                 {.deadline = deadline, .liveness = liveness_.get(), .willing = shm_}, reason);
  if (!group && std::exchange(shm_, false) && rank == 0) {
    log(LogLevel::warning, cat("ranks of this host cannot share memory, Gloo carries all bytes (", reason, ")"));
  }
  return group;
}

std::unique_ptr<GlooGroup> Connections::make_gloo_group(std::string name, const std::vector<int>& members, int rank,
                                                        const StorePtr& store, Traffic traffic) {
  // One device, hence one thread, per kind of traffic: a gather need not wait for the bytes of a reduction.
  auto& device = devices_[traffic];
  if (!device) device = make_gloo_device(world_.hosts() == 1);
  GlooGroup::Options options{options_.connect_deadline, options_.deadline, device, liveness_.get()};
  return std::make_unique<GlooGroup>(std::move(name), members, rank, store, options);
}

// Puts a near group beside the flat one, where that saves bytes between hosts and each host has memory to share.
std::unique_ptr<Group> Connections::with_two_levels(std::string name, std::unique_ptr<GlooGroup> flat,
                                                    MembersByHost hosts) {
  std::vector<int> near;
  int own = 0;
  for (const int member : flat->members()) {
    if (world_.host(member) != world_.host(world_.rank())) continue;
    if (member == world_.rank()) own = static_cast<int>(near.size());
    near.push_back(member);
  }
  auto near_group =
      make_shm_group(cat(name, ".host", world_.host(world_.rank())), near, own, options_.deadline + kNearMargin);
  // All or none.
  const at::Tensor without = at::full({1}, near_group ? 0 : 1, at::kLong);
  flat->all_reduce(without, {"two levels"});
  if (without.item<int64_t>() > 0) return flat;
  return std::make_unique<TwoLevelGroup>(std::move(name), std::move(flat), std::move(near_group), std::move(hosts),
                                         options_.deadline, *liveness_);
}

std::unique_ptr<Group> Connections::make_device_group(std::string name, const std::vector<int>& members, int rank,
                                                      const StorePtr& store) {
  c10::intrusive_ptr<c10d::Backend> backend;
  if (made_) {
    DeviceGroup group{{}, rank, options_.device, options_.deadline};
    for (const int member : members) group.members.push_back(world_.launcher_rank(member));
    backend = users_backend(options_, group);
    backend->setBoundDeviceId(options_.device);
  } else {
    const int size = static_cast<int>(members.size());
    backend = make_nccl(store, rank, size, {name, members, options_.deadline, options_.device});
  }
  C10dGroup::Options options{options_.deadline, /*blocks_host=*/false, liveness_.get(), /*connects=*/true};
  return std::make_unique<C10dGroup>(std::move(name), members, std::move(backend), options);
}

}  // namespace tesserae::comm
