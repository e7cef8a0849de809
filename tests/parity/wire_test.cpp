// Convergence with block-quantised gathers and reductions: the same training, exact and rounded on the wire.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <map>

#include "tesserae/comm/fabric.h"
#include "tesserae/model/gpt.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::testing {
namespace {

constexpr int wire_ranks = 4;
constexpr int wire_steps = 80;
constexpr int64_t vocabulary = 64, wire_length = 24, wire_rows = 4;

/// Rows that count on in steps of their own: what comes next is a rule that has to be learnt.
at::Tensor tokens_of(int step, int rank) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  const auto options = at::TensorOptions().dtype(at::kLong);
  const at::Tensor first = at::randint(vocabulary, {wire_rows, 1}, generator, options);
  const at::Tensor stride = at::randint(1, 4, {wire_rows, 1}, generator, options);
  return (first + stride * at::arange(wire_length + 1, options).unsqueeze(0)).remainder(vocabulary);
}

struct Outcome {
  double loss = 0;   // of the last ten steps
  double bytes = 0;  // sent by a rank
};

Outcome train(comm::Fabric& fabric, comm::Wire parameters, comm::Wire gradients, const mesh::Degrees& degrees) {
  model::Gpt net(model::GptConfig{
      .vocabulary = vocabulary, .dimension = 64, .layers = 2, .heads = 4, .max_sequence = wire_length});
  shard::Options options;
  options.strategy.degrees = degrees;
  options.parameter_wire = parameters;
  options.gradient_wire = gradients;
  auto sharded = shard::shard_model(net, std::shared_ptr<comm::Fabric>(&fabric, [](comm::Fabric*) {}), options);
  optim::AdamW optimizer(sharded, {.lr = 3e-3});
  const auto sent = [&] {
    const auto all = fabric.counters();
    return static_cast<double>(all.all_gather.bytes + all.reduce_scatter.bytes + all.all_reduce.bytes);
  };
  const double before = sent();
  Outcome outcome;
  for (int step = 0; step < wire_steps; ++step) {
    const at::Tensor tokens = tokens_of(step, fabric.rank());
    const at::Tensor loss = net(tokens.narrow(1, 0, wire_length), tokens.narrow(1, 1, wire_length));
    loss.backward();
    optimizer.step({.clip_norm = 1.0});
    optimizer.zero_grad();
    if (step >= wire_steps - 10) outcome.loss += sharded.sum_over_ranks(loss.item<double>()) / wire_ranks / 10;
  }
  outcome.bytes = sent() - before;
  return outcome;
}

Outcome train_everywhere(comm::Wire parameters, comm::Wire gradients, const mesh::Degrees& degrees) {
  Outcome outcome;
  comm::run_local(wire_ranks, [&](comm::Fabric& fabric) {
    const Outcome own = train(fabric, parameters, gradients, degrees);
    if (fabric.rank() == 0) outcome = own;
  });
  return outcome;
}

// What is saved, and what optimizers see, never travelled packed: one step without a gradient changes nothing.
TEST(WireConvergence, MastersAreNotRounded) {
  comm::run_local(wire_ranks, [](comm::Fabric& fabric) {
    std::map<std::string, at::Tensor> values[2];
    for (const auto wire : {comm::Wire::exact, comm::Wire::int8}) {
      model::Gpt net(model::GptConfig{.vocabulary = vocabulary, .dimension = 64, .layers = 2, .heads = 4});
      shard::Options options;
      options.strategy.degrees = {2, 2, 4};
      options.parameter_wire = options.gradient_wire = wire;
      auto sharded = shard::shard_model(net, std::shared_ptr<comm::Fabric>(&fabric, [](comm::Fabric*) {}), options);
      const at::Tensor tokens = tokens_of(0, fabric.rank());
      net(tokens.narrow(1, 0, wire_length), tokens.narrow(1, 1, wire_length)).backward();
      sharded.reshard({1, 4, 4});
      sharded.visit_parameters([&](const std::string& name, const at::Tensor& value) {
        values[wire == comm::Wire::exact ? 0 : 1][name] = value.clone();
      });
    }
    ASSERT_EQ(values[0].size(), values[1].size());
    for (const auto& [name, value] : values[0]) EXPECT_TRUE(at::equal(value, values[1].at(name))) << name;
  });
}

TEST(WireConvergence, RoundingOnTheWireTrainsAsWell) {
  using comm::Wire;
  for (const mesh::Degrees& degrees : {mesh::Degrees{4, 4, 4}, mesh::Degrees{2, 2, 2}, mesh::Degrees{1, 2, 4}}) {
    const Outcome exact = train_everywhere(Wire::exact, Wire::exact, degrees);
    EXPECT_LT(exact.loss, 1.5) << "it learns at all; knowing nothing is 4.2";
    for (const auto& [parameters, gradients] : {std::pair(Wire::int8, Wire::exact), std::pair(Wire::exact, Wire::int8),
                                                std::pair(Wire::int8, Wire::int8), std::pair(Wire::int8, Wire::int4)}) {
      const Outcome rounded = train_everywhere(parameters, gradients, degrees);
      const std::string name = cat(mesh::to_string(degrees), ", parameters ", parameters, ", gradients ", gradients);
      EXPECT_LT(rounded.loss, 1.1 * exact.loss) << name;
      EXPECT_NE(rounded.loss, exact.loss) << name << ": something was rounded";
      EXPECT_LT(rounded.bytes, 0.9 * exact.bytes) << name;
      std::printf("%s: loss %.4f (exact %.4f), bytes %.2f of exact\n", name.c_str(), rounded.loss, exact.loss,
                  rounded.bytes / exact.bytes);
    }
  }
}

}  // namespace
}  // namespace tesserae::testing
