#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <thread>

#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

class SimAutograd : public Sim {};

using List = std::vector<at::Tensor>;

// Numbers that are the same everywhere.
at::Tensor wave(at::IntArrayRef sizes, double pace) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return at::arange(count, at::kFloat).mul(pace).sin().div(3).view(sizes);
}

// A model of which each part is what training uses: an embedding, attention by hand and as torch does it, a norm, two
// layers; trained by AdamW. What is returned are the losses and the parameters.
List train(c10::Device device, int steps) {
  constexpr int64_t words = 11, width = 8, batch = 3, length = 5;
  List parameters{wave({words, width}, 0.7),     at::ones({width}),         at::zeros({width}),
                  wave({3 * width, width}, 1.3), wave({words, width}, 2.1), wave({words}, 0.3)};
  for (at::Tensor& parameter : parameters) parameter = parameter.to(device).requires_grad_();
  List averages, squares, counts, losses;
  for (const at::Tensor& parameter : parameters) {
    averages.push_back(at::zeros_like(parameter));
    squares.push_back(at::zeros_like(parameter));
    counts.push_back(at::zeros({}, parameter.options().requires_grad(false)));
  }
  const at::Tensor tokens = at::arange(batch * length).remainder(words).view({batch, length}).to(device);
  const at::Tensor targets = at::arange(batch * length).mul(3).remainder(words).to(device);
  for (int step = 0; step < steps; ++step) {
    const at::Tensor embedded = at::embedding(parameters[0], tokens);
    const at::Tensor normed = at::layer_norm(embedded, {width}, parameters[1], parameters[2]);
    const auto qkv = at::linear(normed, parameters[3]).chunk(3, -1);
    const at::Tensor weights = at::softmax(qkv[0].matmul(qkv[1].transpose(-1, -2)), -1);
    const at::Tensor mixed = weights.matmul(qkv[2]).add(at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]));
    const at::Tensor logits = at::linear(at::gelu(mixed), parameters[4], parameters[5]);
    const at::Tensor loss = at::cross_entropy_loss(logits.view({-1, words}), targets);
    loss.backward();
    const at::NoGradGuard no_grad;
    List gradients;
    for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    at::_foreach_add_(counts, 1);
    at::_fused_adamw_(parameters, gradients, averages, squares, {}, counts, /*lr=*/0.01, 0.9, 0.99,
                      /*weight_decay=*/0.1, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
    losses.push_back(loss.detach());
  }
  losses.insert(losses.end(), parameters.begin(), parameters.end());
  for (at::Tensor& tensor : losses) tensor = tensor.detach().cpu();
  return losses;
}

bool same(const List& ours, const List& others) {
  bool same = ours.size() == others.size();
  for (size_t i = 0; same && i < ours.size(); ++i) same = at::equal(ours[i], others[i]);
  return same;
}

}  // namespace

TEST_F(SimAutograd, TrainsAsTheCpuDoes) {
  const List expected = train(c10::kCPU, 3);
  EXPECT_EQ(right([&] { return same(train(device(0), 3), expected); }), seeds);
}

TEST_F(SimAutograd, AStepWaitsForNothing) {
  train(device(1), 1);
  const Counters before = counters(1);
  const at::Tensor w = wave({4, 4}, 1.0).to(device(1)).requires_grad_();
  const at::Tensor loaded = wave({2, 4}, 2.0).to(device(1));
  const Counters start = counters(1);
  at::layer_norm(at::linear(loaded, w), {4}).sum().backward();
  EXPECT_EQ((counters(1) - start).synchronizations, 0);
  EXPECT_EQ((counters(1) - start).unknown_shapes, 0);
  EXPECT_GT((counters(1) - start).launches, 4);
  EXPECT_EQ((start - before).synchronizations, 2) << "loading from pageable memory";
}

// Backward runs each operator on the stream of its forward, and orders streams itself.
TEST_F(SimAutograd, StreamsOfTheForwardAreThoseOfTheBackward) {
  EXPECT_EQ(right([] {
              const auto side = side_stream();
              const at::Tensor x = at::ones({500}, on_device()).requires_grad_();
              at::Tensor middle;
              order(current(), side);
              {
                const c10::StreamGuard on(side);
                middle = x.mul(2).mul(3);
              }
              order(side, current());
              middle.mul(5).sum().backward();
              return at::equal(x.grad().cpu(), at::ones({500}).mul(30));
            }),
            seeds);
}

TEST_F(SimAutograd, RanksTrainSideBySide) {
  const List expected = train(c10::kCPU, 2);
  std::vector<List> outcomes(4);
  std::vector<std::thread> ranks;
  for (c10::DeviceIndex rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      const c10::DeviceGuard here(device(rank));
      outcomes[static_cast<size_t>(rank)] = train(device(rank), 2);
    });
  }
  for (auto& rank : ranks) rank.join();
  for (const List& outcome : outcomes) EXPECT_TRUE(same(outcome, expected));
}

TEST_F(SimAutograd, DropoutDrawsForTheBackwardToo) {
  const at::Tensor x = at::ones({1000}, on_device()).requires_grad_();
  const at::Tensor y = at::dropout(x, 0.5, /*train=*/true);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), y.detach().cpu()));
}

}  // namespace tesserae::sim
