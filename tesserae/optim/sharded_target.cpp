#include "tesserae/optim/target.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::optim {

Target target_of(shard::Sharded& sharded) {
  Target target;
  target.shards = &sharded.shards();
  target.publish = [&sharded](int index) { sharded.publish(index); };
  target.zero_grad = [&sharded] { sharded.zero_grad(); };
  target.sum_over_chunks = [&sharded](double value) {
    // The degrees are read at each call: they change when the model is resharded.
    const int replicas = sharded.fabric().size() / sharded.options().strategy.degrees.optimizer;
    return sharded.sum_over_ranks(value) / replicas;
  };
  return target;
}

}  // namespace tesserae::optim
