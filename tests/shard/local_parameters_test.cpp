// Engines that are joined, and shards that an optimizer made for plain parameters updates: what the Python face is
// built on.

#include "tesserae/shard/local_parameters.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tesserae/shard/discover.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/user_parameters.h"
#include "tesserae/shard/whole_model.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

/// A net whose units were sharded one by one, the innermost first, each adopted by the one around it.
class JoinedNet {
 public:
  JoinedNet(const NetOptions& net_options, comm::Fabric& fabric, const Options& options, bool one_tensor)
      : net(net_options) {
    fill_all(*net);
    auto specs = discover_units(*net);
    std::vector<std::shared_ptr<Engine>> engines(specs.size());
    for (size_t i = specs.size(); i-- > 0;) {
      auto alone = specs[i];
      const std::string name = alone.name;
      alone.name.clear();
      std::vector<std::vector<at::Tensor>> local;
      for (auto& flat : alone.flats) {
        // Names as seen from the unit: what adoption puts before them is tested by the names in an error.
        for (auto& slot : flat.slots) {
          for (auto& full : slot.names) full = name.empty() ? full : full.substr(name.size() + 1);
        }
        local.emplace_back();
        for (size_t k = 0; k < (one_tensor ? 1 : flat.slots.size()); ++k) {
          local.back().push_back(at::empty({0}).set_requires_grad(flat.trainable));
        }
      }
      engines[i] = std::make_shared<Engine>(std::vector<UnitSpec>{alone}, share(fabric), options);
      UserParameters::attach(engines[i]->root(), local);
      for (const auto& tensors : local) parameters.insert(parameters.end(), tensors.begin(), tensors.end());
      for (size_t child = i + 1; child < specs.size(); ++child) {
        if (specs[child].parent != static_cast<int>(i)) continue;
        const std::string inside = name.empty() ? specs[child].name : specs[child].name.substr(name.size() + 1);
        engines[i]->adopt(*engines[child], inside);
      }
    }
    engine = engines[0];
  }

  double step(const Batch& batch, double lr) { return step(std::vector<Batch>{batch}, lr); }

  /// Accumulates over the batches; their mean loss.
  double step(const std::vector<Batch>& batches, double lr) {
    for (auto& parameter : parameters) parameter.mutable_grad() = at::Tensor();
    double loss = 0;
    for (size_t i = 0; i < batches.size(); ++i) {
      engine->set_boundary(i + 1 == batches.size());
      const at::Tensor mine = net(batches[i].tokens, batches[i].targets) / static_cast<double>(batches.size());
      mine.backward();
      loss += mine.item<double>();
    }
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters) {
      if (parameter.grad().defined()) parameter.sub_(parameter.grad(), lr);
    }
    return loss;
  }

  Net net;
  Tensors parameters;
  std::shared_ptr<Engine> engine;
};

void expect_reference(const NetOptions& net, const mesh::Strategy& strategy, bool one_tensor, bool elastic = false) {
  const Reference expected = train_reference(net, 3, 0.5);
  comm::run_local(4, [&](comm::Fabric& fabric) {
    Options options;
    options.strategy = strategy;
    options.elastic = elastic;
    JoinedNet joined(net, fabric, options, one_tensor);
    for (int step = 0; step < 3; ++step) {
      const double loss = joined.step(batch_of(net, step, fabric.rank(), fabric.size()), 0.5);
      EXPECT_NEAR(sum_over_ranks(*joined.engine, loss) / 4, expected.losses[step], 1e-5 * expected.losses[step]);
    }
    Values values;
    visit_parameters(
        *joined.engine, [&](const std::string& name, const at::Tensor& value) { values[name] = value.clone(); }, false);
    EXPECT_LT(worst_difference(values, expected.parameters), 1e-5);
  });
}

TEST(LocalParameters, AnyOptimizerTrainsLikeOneProcess) {
  for (const char* name : {"FULL_SHARD", "SHARD_GRAD_OP", "ZERO_2", "NO_SHARD"}) {
    for (const bool one_tensor : {false, true}) {
      SCOPED_TRACE(cat(name, one_tensor ? ", one tensor a buffer" : ", a tensor a parameter"));
      expect_reference({.nested = true, .unused = true}, mesh::preset(name, 4), one_tensor);
      expect_reference({.nested = true, .unused = true}, mesh::preset(name, 4), one_tensor, /*elastic=*/true);
    }
  }
}

TEST(LocalParameters, AnAccumulationBeginsWithTheNewValues) {
  const NetOptions net;
  for (const auto& degrees : mesh::all_degrees(4)) {
    SCOPED_TRACE(to_string(degrees));
    const Reference expected = train_reference(net, 3, 0.5, /*micro=*/2);
    comm::run_local(4, [&](comm::Fabric& fabric) {
      Options options;
      options.strategy = {degrees, true, true};
      JoinedNet joined(net, fabric, options, false);
      for (int step = 0; step < 3; ++step) {
        std::vector<Batch> batches;
        for (int micro = 0; micro < 2; ++micro) {
          batches.push_back(batch_of(net, step, micro * fabric.size() + fabric.rank(), 2 * fabric.size()));
        }
        const double loss = sum_over_ranks(*joined.engine, joined.step(batches, 0.5)) / 4;
        EXPECT_NEAR(loss, expected.losses[step], 1e-5 * expected.losses[step]);
      }
    });
  }
}

TEST(LocalParameters, FrozenAndTiedParametersTrainLikeOneProcess) {
  expect_reference({.tied = true, .frozen_block = 1, .twice = 2}, mesh::preset("HYBRID_SHARD", 4, 2), false);
}

/// One unit on one rank of a fabric that moves nothing: what a slice holds can be computed by hand.
struct Alone {
  explicit Alone(int ranks, bool elastic = false)
      : fabric(comm::Fabric::null(mesh::World::single_host(0, ranks))),
        joined(
            net, *fabric,
            [&] {
              Options options;
              options.strategy = mesh::preset("FULL_SHARD", ranks);
              options.elastic = elastic;
              return options;
            }(),
            false) {}
  NetOptions net;
  std::shared_ptr<comm::Fabric> fabric;
  JoinedNet joined;
};

TEST(LocalParameters, ReplacedValuesOfTheSameSizeAreTaken) {
  Alone alone(1);
  at::Tensor& parameter = alone.joined.parameters[0];
  const at::Tensor values = at::full_like(parameter, 0.25);
  parameter.set_data(values.clone());
  const Batch batch = batch_of(alone.net, 0, 0, 1);
  alone.joined.net(batch.tokens, batch.targets);
  EXPECT_TRUE(parameter.detach().equal(values));
  EXPECT_NE(parameter.const_data_ptr(), values.const_data_ptr()) << "it shows the master again";
  bool found = false;
  for (const auto& shard : alone.joined.engine->shards())
    found = found || shard.master.slice(0, 0, 4).eq(0.25).all().item<bool>();
  EXPECT_TRUE(found) << "no master has the new values";
}

TEST(LocalParameters, AReplacedSizeNamesTheParameter) {
  Alone alone(1);
  alone.joined.parameters[0].set_data(at::zeros({3}));
  const Batch batch = batch_of(alone.net, 0, 0, 1);
  try {
    alone.joined.net(batch.tokens, batch.targets);
    FAIL() << "a parameter of another size was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("block"));
    EXPECT_THAT(error.what(), HasSubstr("has 3 elements"));
  }
}

TEST(LocalParameters, GradientsAccumulateUnlessTheyWereEmptied) {
  Alone alone(1);
  const Batch batch = batch_of(alone.net, 0, 0, 1);
  const auto backward = [&] { alone.joined.net(batch.tokens, batch.targets).backward(); };
  Tensors& parameters = alone.joined.parameters;
  backward();
  const at::Tensor once = parameters[0].grad().clone(), other = parameters[1].grad().clone();
  backward();
  EXPECT_TRUE(parameters[0].grad().allclose(once * 2));
  // One is emptied, one is replaced: zero and the replacement are what the next backward adds to.
  parameters[0].mutable_grad() = at::Tensor();
  parameters[1].mutable_grad() = at::full_like(other, 3.0);
  backward();
  EXPECT_TRUE(parameters[0].grad().allclose(once));
  EXPECT_TRUE(parameters[1].grad().allclose(other + 3.0));
}

// As `p.grad.data = ...` does: the tensor stays, its memory is another.
TEST(LocalParameters, AGradientWhoseDataWereReplacedIsAddedTo) {
  Alone alone(1);
  const Batch batch = batch_of(alone.net, 0, 0, 1);
  const auto backward = [&] { alone.joined.net(batch.tokens, batch.targets).backward(); };
  at::Tensor& parameter = alone.joined.parameters[0];
  backward();
  const at::Tensor once = parameter.grad().clone();
  parameter.mutable_grad().set_data(at::full_like(once, 3.0));
  backward();
  EXPECT_TRUE(parameter.grad().allclose(once + 3.0));
  parameter.mutable_grad().set_data(at::full_like(once, 3.0));
  parameter.mutable_grad().zero_();
  backward();
  EXPECT_TRUE(parameter.grad().allclose(once));
}

TEST(LocalParameters, ElasticMemoryGoesWithTheLastGradientAndLeavesAloneWhatTheUserKeeps) {
  Alone alone(1, /*elastic=*/true);
  const Batch batch = batch_of(alone.net, 0, 0, 1);
  const auto backward = [&] { alone.joined.net(batch.tokens, batch.targets).backward(); };
  Tensors& parameters = alone.joined.parameters;
  backward();
  const int64_t with_gradients = alone.joined.engine->statistics().state_bytes;
  const at::Tensor kept = parameters[0].grad(), copy = kept.clone();
  for (auto& parameter : parameters) parameter.mutable_grad() = at::Tensor();
  {
    const at::NoGradGuard evaluation;
    alone.joined.net(batch.tokens, batch.targets);
  }
  EXPECT_LT(alone.joined.engine->statistics().state_bytes, with_gradients);
  {
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters) parameter.mul_(0.5);
  }
  backward();
  EXPECT_TRUE(kept.equal(copy)) << "the next backward has memory of its own";
  EXPECT_FALSE(parameters[0].grad().equal(copy));
  EXPECT_EQ(alone.joined.engine->statistics().state_bytes, with_gradients);
}

TEST(LocalParameters, AParameterThatNeedsNoGradientAnyMoreHasNone) {
  Alone alone(1);
  alone.joined.parameters[0].set_requires_grad(false);
  const Batch batch = batch_of(alone.net, 0, 0, 1);
  alone.joined.net(batch.tokens, batch.targets).backward();
  EXPECT_FALSE(alone.joined.parameters[0].grad().defined());
  EXPECT_TRUE(alone.joined.parameters[1].grad().defined());
}

TEST(LocalParameters, AnEngineThatHasRunIsNotAdopted) {
  Alone inner(1), outer(1);
  const Batch batch = batch_of(inner.net, 0, 0, 1);
  inner.joined.net(batch.tokens, batch.targets);
  EXPECT_THROW(outer.joined.engine->adopt(*inner.joined.engine, "inner"), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::shard::testing
