#include "tesserae/optim/target.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::optim {

Target target_of(shard::Engine& engine) {
  Target target;
  target.shards = &engine.shards();
  target.publish = [&engine](int index) { engine.publish(index); };
  target.zero_grad = [&engine] { engine.zero_grad(); };
  target.attach = [&engine](shard::Companion& companion) { return engine.attach(companion); };
  // Degrees are read at each call: they change when the model is resharded.
  target.share = [&engine](int index) { return 1.0 / engine.replicas(index); };
  target.sum_over_chunks = [&engine](double value) { return engine.sum_over_ranks(value); };
  target.max_over_chunks = [&engine](double value) { return engine.max_over_ranks(value); };
  return target;
}

Target target_of(shard::Sharded& sharded) {
  return target_of(sharded.engine());
}

}  // namespace tesserae::optim
