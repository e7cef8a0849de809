#include "tests/sim/fabric.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tesserae/comm/group_table.h"
#include "tesserae/comm/transports/c10d_group.h"
#include "tests/sim/process_group.h"

namespace tesserae::sim {
namespace {

// What the ranks of one job share.
struct Rooms {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Room>> by_name;

  std::shared_ptr<Room> room(const std::string& name, int size) {
    const std::lock_guard lock(mutex);
    auto& room = by_name[name];
    if (!room) room = std::make_shared<Room>(name, size);
    return room;
  }
};

class DeviceFabric final : public comm::Fabric {
 public:
  DeviceFabric(Rooms& rooms, int rank, int size, c10::Device device, std::chrono::milliseconds deadline)
      : rooms_(rooms),
        world_(mesh::World::single_host(rank, size)),
        device_(device),
        deadline_(deadline),
        table_(rank, size, comm::Lane::Kind::stream, device_) {}
  ~DeviceFabric() override { table_.clear(); }

  const mesh::World& world() const override { return world_; }
  c10::Device device() const override { return device_; }
  comm::Group& group(const std::vector<int>& members, comm::Traffic traffic) override {
    return table_.group(members, traffic, [this](std::string name, const std::vector<int>& members, int rank) {
      auto backend = c10::make_intrusive<ProcessGroup>(rooms_.room(name, static_cast<int>(members.size())), rank,
                                                       device_.index(), ProcessGroup::Options{.deadline = deadline_});
      backend->setBoundDeviceId(device_);
      const comm::C10dGroup::Options options{.deadline = deadline_, .connects = true};
      return std::make_unique<comm::C10dGroup>(std::move(name), members, std::move(backend), options);
    });
  }
  comm::Lane& lane(comm::Traffic traffic) override { return table_.lane(traffic); }
  comm::Counters counters() const override { return table_.counters(); }

 protected:
  comm::GroupTable* table() const override { return &table_; }

 private:
  Rooms& rooms_;
  mesh::World world_;
  const c10::Device device_;
  const std::chrono::milliseconds deadline_;
  mutable comm::GroupTable table_;
};

}  // namespace

void run_on_devices(int ranks, const std::function<void(comm::Fabric&)>& body, std::chrono::milliseconds deadline,
                    int devices) {
  Rooms rooms;
  std::vector<std::exception_ptr> failures(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto index = static_cast<c10::DeviceIndex>(devices > 0 ? rank % devices : rank);
      const c10::DeviceGuard here(sim::device(index));
      const c10::impl::VirtualGuardImpl guard(c10::kPrivateUse1);
      const c10::StreamGuard on(devices > 0
                                    ? guard.getStreamFromGlobalPool(sim::device(index), /*isHighPriority=*/false)
                                    : guard.getStream(sim::device(index)));
      try {
        DeviceFabric fabric(rooms, rank, ranks, sim::device(index), deadline);
        body(fabric);
        Device::at(index).synchronize();
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace tesserae::sim
