// What a unit's module does when it is called as any module of libtorch is.

#include "tesserae/shard/unit.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <stdexcept>

#include "tesserae/autograd/saving.h"
#include "tesserae/base/error.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

/// Scales x, and adds what is given.
class MaskedImpl : public torch::nn::Module {
 public:
  MaskedImpl() { scale = register_parameter("scale", at::full({4}, 2.0)); }
  at::Tensor forward(const at::Tensor& before, const at::Tensor& x, const at::Tensor& after) {
    at::Tensor y = x * scale;
    if (before.defined()) y = y + before;
    return after.defined() ? y * after : y;
  }
  at::Tensor scale;
};

TEST(Unit, RecomputesWithTensorsThatAreNotThere) {
  const at::Tensor none, ones = at::ones({4});
  for (const bool has_before : {false, true}) {
    for (const bool has_after : {false, true}) {
      at::Tensor gradients[2];
      for (const bool recompute : {false, true}) {
        Unit<MaskedImpl> unit;
        unit->checkpoint_activations(recompute);
        at::Tensor x = at::arange(4, at::kFloat).set_requires_grad(true);
        unit(has_before ? ones : none, x, has_after ? ones * 3 : none).square().sum().backward();
        gradients[recompute] = at::cat({x.grad(), unit->scale.grad()});
      }
      EXPECT_TRUE(at::equal(gradients[0], gradients[1])) << has_before << has_after;
    }
  }
}

/// Keeps a copy of all that is saved.
class TakesAll final : public autograd::Saving {
 public:
  std::function<at::Tensor()> save(const at::Tensor& tensor) override {
    return [copy = tensor.clone()] { return copy; };
  }
};

TEST(Unit, WhatItRecomputesFromMayLeave) {
  Unit<MaskedImpl> unit;
  unit->checkpoint_activations();
  const at::Tensor leaf = at::arange(4, at::kFloat).set_requires_grad(true);
  const auto saving = std::make_shared<TakesAll>();
  autograd::set_saving(saving);
  at::Tensor x = leaf + 1;
  const auto memory = x.storage().getWeakStorageImpl();
  const at::Tensor y = unit(at::Tensor(), x, at::Tensor());
  autograd::set_saving({});
  x.reset();
  EXPECT_TRUE(memory.expired());
  y.square().sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), (leaf.detach() + 1) * 8));
}

TEST(Unit, ThatRecomputesHasFirstDerivativesInABackwardOnly) {
  Unit<MaskedImpl> unit;
  unit->checkpoint_activations();
  at::Tensor x = at::arange(4, at::kFloat).set_requires_grad(true);
  const auto loss = [&] { return unit(at::Tensor(), x, at::Tensor()).square().sum(); };
  EXPECT_THROW(torch::autograd::grad({loss()}, {x}), InvalidArgument);
  EXPECT_THROW(loss().backward({}, /*retain_graph=*/true, /*create_graph=*/true), InvalidArgument);
  EXPECT_FALSE(unit->scale.grad().defined());
}

TEST(Unit, ARecomputationThatThrowsLeavesTheGeneratorAsItWas) {
  int calls = 0;
  const auto compute = [&calls](const at::Tensor& x) {
    if (++calls == 2) throw std::runtime_error("out of memory");
    return at::dropout(x, 0.5, /*train=*/true);
  };
  const at::Tensor x = at::ones({8}).set_requires_grad(true);
  const at::Tensor y = autograd::recompute_in_backward(compute, x);
  at::rand({3});
  const at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const at::Tensor before = generator.get_state();
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  EXPECT_TRUE(at::equal(generator.get_state(), before));
}

TEST(Unit, ZeroGradOfTheModuleForgetsTheGradientsOfItsShards) {
  const Training run{.steps = 3};
  comm::run_local(2, [&](comm::Fabric& fabric) {
    const Reference expected = train_sharded(fabric, run);
    Net net(run.net);
    fill_all(*net);
    Sharded sharded = shard_model(net, share(fabric), run.options);
    for (int step = 0; step < run.steps; ++step) {
      net->zero_grad();
      const Batch batch = batch_of(run.net, step, fabric.rank(), fabric.size());
      for (int twice = 0; twice < 2; ++twice) {  // gradients of the first are forgotten, those of an accumulation too
        if (twice == 1) net->zero_grad();
        const bool accumulates = twice == 0 && step == 1;
        const auto backward = [&] { net(batch.tokens, batch.targets).backward(); };
        if (accumulates) {
          const NoSync scope = sharded.no_sync();
          backward();
        } else {
          backward();
        }
      }
      const at::NoGradGuard no_grad;
      for (auto& shard : sharded.shards()) {
        shard.master.sub_(shard.grad, run.lr);
        sharded.publish(shard.index);
      }
    }
    Values values;
    sharded.visit_parameters([&](const std::string& name, const at::Tensor& value) { values[name] = value.clone(); });
    EXPECT_EQ(worst_difference(values, expected.parameters), 0) << "rank " << fabric.rank();
  });
}

TEST(Unit, OfAShardedModelIsNeitherConvertedNorMoved) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    for (const char* strategy : {"FULL_SHARD", "NO_SHARD"}) {
      Net net{NetOptions{}};
      fill_all(*net);
      Options options;
      options.strategy = mesh::preset(strategy, fabric.size());
      const Sharded sharded = shard_model(net, share(fabric), options);
      EXPECT_THROW(net->to(at::kBFloat16), InvalidArgument) << strategy;
      EXPECT_THROW(net->to(at::kMeta), InvalidArgument) << strategy;
      EXPECT_THROW(net->to(at::kCPU, at::kDouble), InvalidArgument) << strategy;
      net->to(at::kCPU, at::kFloat);  // what they are
      const Batch batch = batch_of(net->options, 0, fabric.rank(), fabric.size());
      net(batch.tokens, batch.targets).backward();
    }
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
