#include "tesserae/optim/target.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/local_state.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/shard/whole_model.h"

namespace tesserae::optim {
namespace {

class EngineTarget final : public Target {
 public:
  explicit EngineTarget(shard::Engine& engine) : engine_(engine) {}

  const shard::ShardList& shards() const override { return engine_.shards(); }
  at::Tensor new_state(const shard::Shard& shard) override { return shard::new_state(engine_, shard); }
  void publish(int index) override { engine_.publish(index); }
  void update_later(int index, std::function<void()> update) override {
    engine_.update_later(index, std::move(update));
  }
  void complete_updates() override { engine_.complete_updates(); }
  void zero_grad() override { engine_.zero_grad(); }
  std::shared_ptr<void> add_companion(shard::Companion& companion) override { return engine_.add_companion(companion); }

  bool counts_repeated() const override { return engine_.root().sharding().mesh->writes_unsplit(); }
  // Over the state ranks of each tensor index first: then all of these bring the same, so all ranks get the same bits.
  double sum_over_chunks(double value, std::vector<double>* also) override {
    std::vector<double> row{value};
    if (also != nullptr) row.insert(row.end(), also->begin(), also->end());
    row = shard::sums_over_ranks(engine_, row);
    const shard::UnitContext& context = engine_.root().context();
    shard::over_tensor_ranks(*context.sharding->mesh, row, comm::Reduction::sum, {"", context.statistics().steps});
    if (also != nullptr) also->assign(row.begin() + 1, row.end());
    return row.front();
  }
  std::optional<c10::Device> device() const override {
    const c10::Device device = engine_.root().sharding().state_device;
    return device.is_cpu() ? std::nullopt : std::optional(device);
  }
  void sum_on_device(const at::Tensor& row) override {
    comm::Group& group = shard::state_ranks(engine_).everyone();
    group.all_reduce(row, label());
    if (comm::Group* const tensor = tensor_group()) tensor->all_reduce(row, label());
  }
  // Other tensor ranks may have no group with a rank that is lost: they are told nothing that this one has not checked.
  at::Tensor sum_on_host(const at::Tensor& row) override {
    comm::Group& group = shard::state_ranks(engine_).everyone();
    group.all_reduce(row, label());
    const at::Tensor sums = group.to_host(row);
    comm::Group* const tensor = tensor_group();
    if (tensor == nullptr) return sums;
    tensor->all_reduce(row, label());
    return tensor->to_host(row);
  }
  double max_over_chunks(double value) override {
    const shard::UnitContext& context = engine_.root().context();
    return shard::over_tensor_ranks(*context.sharding->mesh, shard::max_over_ranks(engine_, value),
                                    comm::Reduction::maximum, {"", context.statistics().steps});
  }

 private:
  comm::Label label() const { return {"", engine_.root().context().statistics().steps}; }
  // Null where it is this rank alone.
  comm::Group* tensor_group() const {
    comm::MeshFabric& mesh = *engine_.root().context().sharding->mesh;
    if (mesh.degree(mesh::axes::tensor) == 1) return nullptr;
    return &mesh.group(mesh::axes::tensor, comm::Traffic::control);
  }

  shard::Engine& engine_;
};

}  // namespace

std::shared_ptr<Target> target_of(shard::Engine& engine) {
  return std::make_shared<EngineTarget>(engine);
}

std::shared_ptr<Target> target_of(shard::Sharded& sharded) {
  return target_of(sharded.engine());
}

}  // namespace tesserae::optim
