#include "tesserae/optim/target.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::optim {

namespace {

// After the data-parallel ranks of each tensor index: all of these bring the same, so all ranks get the same bits.
double over_tensor_ranks(shard::Engine& engine, double value, comm::Reduction how) {
  const shard::Context& context = engine.context();
  return shard::over_tensor_ranks(context.options.tensor_group, value, how, context.device,
                                  {"", context.statistics->steps});
}

}  // namespace

Target target_of(shard::Engine& engine) {
  Target target;
  target.shards = &engine.shards();
  target.publish = [&engine](int index) { engine.publish(index); };
  target.zero_grad = [&engine] { engine.zero_grad(); };
  target.attach = [&engine](shard::Companion& companion) { return engine.attach(companion); };
  // Degrees are read at each call: they change when the model is resharded.
  target.share = [&engine](int index) { return 1.0 / engine.replicas(index); };
  const comm::Group* tensor_group = engine.context().options.tensor_group;
  target.counts_repeated = tensor_group == nullptr || tensor_group->rank() == 0;
  target.sum_over_chunks = [&engine](double value) {
    return over_tensor_ranks(engine, engine.sum_over_ranks(value), comm::Reduction::sum);
  };
  target.max_over_chunks = [&engine](double value) {
    return over_tensor_ranks(engine, engine.max_over_ranks(value), comm::Reduction::maximum);
  };
  return target;
}

Target target_of(shard::Sharded& sharded) {
  return target_of(sharded.engine());
}

}  // namespace tesserae::optim
