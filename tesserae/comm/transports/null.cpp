#include "tesserae/comm/transports/null.h"

#include "tesserae/comm/fabric.h"
#include "tesserae/comm/group_table.h"

namespace tesserae::comm {

namespace {

class NullFabric final : public Fabric {
 public:
  NullFabric(const mesh::World& world, c10::Device device)
      : world_(world), device_(device), table_(world.rank(), world.size(), Lane::Kind::immediate, device) {}

  const mesh::World& world() const override { return world_; }
  c10::Device device() const override { return device_; }
  Group& group(const std::vector<int>& members, Traffic traffic) override {
    return table_.group(members, traffic, [](std::string name, const std::vector<int>& members, int rank) {
      return std::make_unique<NullGroup>(std::move(name), members, rank);
    });
  }
  Lane& lane(Traffic traffic) override { return table_.lane(traffic); }
  Counters counters() const override { return table_.counters(); }

 protected:
  GroupTable* table() const override { return &table_; }

 private:
  mesh::World world_;
  c10::Device device_;
  mutable GroupTable table_;
};

}  // namespace

std::shared_ptr<Fabric> Fabric::null(const mesh::World& world, c10::Device device) {
  return std::make_shared<NullFabric>(world, device);
}

}  // namespace tesserae::comm
