// A model of one's own, sharded over the ranks that a launcher has started: it learns to add its inputs up.
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdio>

#include "tesserae/tesserae.h"

namespace {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : wide(register_module("wide", torch::nn::Linear(width, 4 * width))),
        narrow(register_module("narrow", torch::nn::Linear(4 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + narrow->forward(torch::gelu(wide->forward(x))); }
  torch::nn::Linear wide, narrow;
};

// What is a Unit is gathered, computed with and freed as one; the rest belongs to the unit around it.
struct ModelImpl : torch::nn::Module {
  ModelImpl(int64_t width, int64_t blocks) : head(register_module("head", torch::nn::Linear(width, 1))) {
    for (int64_t i = 0; i < blocks; ++i) {
      units.push_back(register_module("block" + std::to_string(i), tesserae::Unit<BlockImpl>(width)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& unit : units) x = unit->forward(x);
    return head->forward(x);
  }
  std::vector<tesserae::Unit<BlockImpl>> units;
  torch::nn::Linear head;
};

}  // namespace

int main() {
  const auto fabric = tesserae::Fabric::connect(tesserae::World::from_environment());
  torch::manual_seed(0);  // the same on all ranks
  tesserae::Unit<ModelImpl> model(32, 4);
  auto sharded = tesserae::shard_model(
      model, fabric, {.strategy = tesserae::from_hybrid_shard_degree(fabric->size(), fabric->size())});
  tesserae::AdamW optimizer(sharded, {.lr = 3e-3});
  torch::manual_seed(1 + fabric->rank());  // data of its own
  for (int step = 0; step <= 100; ++step) {
    const at::Tensor x = torch::randn({64, 32});
    const at::Tensor loss = (model->forward(x) - x.sum(1, /*keepdim=*/true)).square().mean();
    loss.backward();
    optimizer.step({.clip_norm = 1.0});
    optimizer.zero_grad();
    if (step % 20 == 0 && fabric->rank() == 0) std::printf("step %d: loss %.4f\n", step, loss.item<double>());
  }
}
