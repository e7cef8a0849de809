// What a unit's module does when it is called as any module of libtorch is.

#include "tesserae/shard/unit.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

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

TEST(Unit, ACopyKnowsNoEngine) {
  Unit<MaskedImpl> unit;
  std::shared_ptr<UnitImpl<MaskedImpl>> copy;
  const at::Tensor x = at::ones({4}), none;
  {
    const Sharded sharded = shard_model(unit.ptr(), comm::Fabric::null(mesh::World::single_host(0, 1)));
    copy = std::make_shared<UnitImpl<MaskedImpl>>(*unit);
  }
  // It shares the parameters of the other, and nothing calls an engine that has gone.
  EXPECT_THROW(copy->forward(none, x, none), c10::Error);
}

/// What a forward may return: tensors in all that for_each_tensor() looks into, and what is none.
struct Found {
  at::Tensor doubled;
  std::string name;
};
template <class Visit>
void for_each_tensor(const Found& found, const Visit& visit) {
  visit(found.doubled);
}
using Listed = std::tuple<at::Tensor, std::vector<at::Tensor>, std::pair<std::optional<at::Tensor>, int64_t>, Found>;

/// Takes tensors in a list.
class ListedImpl : public torch::nn::Module {
 public:
  ListedImpl() { scale = register_parameter("scale", at::full({4}, 2.0)); }
  Listed forward(const std::vector<at::Tensor>& list, const std::optional<at::Tensor>& more) {
    const at::Tensor y = list.at(0) * scale;
    return {y, {y.sin(), y.cos() * list.at(1)}, {more ? std::optional(y + *more) : std::nullopt, 7}, {y * 2, "twice"}};
  }
  at::Tensor scale;
};

TEST(Unit, RecomputesWhatTensorsAreNestedIn) {
  for (const bool has_more : {false, true}) {
    std::vector<at::Tensor> gradients[2];
    for (const bool recompute : {false, true}) {
      Unit<ListedImpl> unit;
      unit->checkpoint_activations(recompute);
      const at::Tensor a = at::arange(4, at::kFloat).set_requires_grad(true), b = at::ones({4}).set_requires_grad(true);
      const at::Tensor c = at::full({4}, 3.0).set_requires_grad(true);
      const auto [y, list, maybe, found] =
          unit(std::vector<at::Tensor>{a, b}, has_more ? std::optional(c) : std::nullopt);
      ASSERT_EQ(list.size(), 2u);
      EXPECT_EQ(maybe.first.has_value(), has_more);
      EXPECT_EQ(maybe.second, 7);
      EXPECT_EQ(found.name, "twice");
      at::Tensor loss = (y.square() + list[0] + list[1] * found.doubled).sum();
      if (has_more) loss = loss + maybe.first->square().sum();
      loss.backward();
      gradients[recompute] = {a.grad(), b.grad(), unit->scale.grad()};
      if (has_more) gradients[recompute].push_back(c.grad());
    }
    for (size_t i = 0; i < gradients[0].size(); ++i) EXPECT_TRUE(at::equal(gradients[0][i], gradients[1][i])) << i;
  }
}

/// Writes to what it is given, which has no copy.
struct Counter {
  Counter() = default;
  Counter(const Counter&) = delete;
  int calls = 0;
};
class CountingImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x, Counter& counter, std::vector<at::Tensor>& kept) {
    ++counter.calls;
    kept.push_back(x);
    return x * 2;
  }
};

TEST(Unit, WhatAForwardWritesToIsNotCopied) {
  Unit<CountingImpl> unit;
  Counter counter;
  std::vector<at::Tensor> kept;
  unit(at::ones({2}), counter, kept);
  EXPECT_EQ(counter.calls, 1);
  EXPECT_EQ(kept.size(), 1u);
  unit->checkpoint_activations();
  EXPECT_THROW(unit(at::ones({2}), counter, kept), InvalidArgument) << "it cannot be run again";
}

TEST(Unit, TensorsInAListAreInputsAsOthersAre) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Unit<ListedImpl> unit;
    Options options;
    options.precision = Precision::bf16();
    Sharded sharded = shard_model(unit, share(fabric), options);
    const auto outputs = unit(std::vector<at::Tensor>{at::ones({4}), at::ones({4})}, std::optional(at::ones({4})));
    EXPECT_EQ(std::get<0>(outputs).scalar_type(), at::kBFloat16);
    EXPECT_EQ(std::get<2>(outputs).first->scalar_type(), at::kBFloat16);
    std::get<3>(outputs).doubled.sum().backward();
    EXPECT_EQ(sharded.shards()[0].grad.sum().item<double>(), 8) << "2 for each element";
  });
}

/// Whatever is done to it, as an error of ours; empty: nothing was wrong.
std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Unit, NewValuesThatAreOnTheirWayCannotBeRead) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Net net{NetOptions{}};
    fill_all(*net);
    Options options;
    options.strategy = mesh::preset("ZERO_1", fabric.size());
    Sharded sharded = shard_model(net, share(fabric), options);
    const Batch batch = batch_of(net->options, 0, fabric.rank(), fabric.size());
    net(batch.tokens, batch.targets).backward();
    const at::Tensor weight = net->parameters().front();
    const double before = weight.sum().item<double>();
    {
      const at::NoGradGuard no_grad;
      for (auto& shard : sharded.shards()) {
        shard.master.add_(1);
        sharded.publish(shard.index);
      }
    }
    EXPECT_THAT(refusal([&] { weight.sum(); }), ::testing::HasSubstr("its new values come from the ranks")) << "whole";
    EXPECT_THAT(refusal([&] { weight.t().sum(); }), ::testing::HasSubstr("Sharded::visit_parameters")) << "a view";
    net(batch.tokens, batch.targets);
    EXPECT_NEAR(weight.sum().item<double>(), before + static_cast<double>(weight.numel()), 1e-2);
  });
}

TEST(Unit, ParametersWithOtherDataAreRefused) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    for (const char* strategy : {"FULL_SHARD", "ZERO_1", "NO_SHARD"}) {
      Net net{NetOptions{}};
      fill_all(*net);
      Options options;
      options.strategy = mesh::preset(strategy, fabric.size());
      const Sharded sharded = shard_model(net, share(fabric), options);
      const Batch batch = batch_of(net->options, 0, fabric.rank(), fabric.size());
      const auto parameters = net->named_parameters();
      at::Tensor(parameters.front().value()).set_data(at::ones_like(parameters.front().value()));
      const std::string said = refusal([&] { net(batch.tokens, batch.targets); });
      EXPECT_THAT(said, ::testing::HasSubstr(parameters.front().key() + " of unit")) << strategy;
      EXPECT_THAT(said, ::testing::HasSubstr("Load before shard_model")) << strategy;
    }
  });
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
