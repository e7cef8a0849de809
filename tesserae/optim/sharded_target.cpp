#include "tesserae/optim/target.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/shard/whole_model.h"

namespace tesserae::optim {
namespace {

class EngineTarget final : public Target {
 public:
  explicit EngineTarget(shard::Engine& engine) : engine_(engine) {}

  const shard::ShardList& shards() const override { return engine_.shards(); }
  void publish(int index) override { engine_.publish(index); }
  void zero_grad() override { engine_.zero_grad(); }
  std::shared_ptr<void> add_companion(shard::Companion& companion) override { return engine_.add_companion(companion); }

  bool counts_repeated() const override { return engine_.root().sharding().mesh->writes_unsplit(); }
  double sum_over_chunks(double value) override {
    return over_tensor_ranks(shard::sum_over_ranks(engine_, value), comm::Reduction::sum);
  }
  double max_over_chunks(double value) override {
    return over_tensor_ranks(shard::max_over_ranks(engine_, value), comm::Reduction::maximum);
  }

 private:
  // After the state ranks of each tensor index: all of these bring the same, so all ranks get the same bits.
  double over_tensor_ranks(double value, comm::Reduction how) const {
    const shard::UnitContext& context = engine_.root().context();
    return shard::over_tensor_ranks(*context.sharding->mesh, value, how, {"", context.statistics().steps});
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
