// A model of one's own, as a job that can be ended, continued, watched and turned: docs/recipes/cpp.md.
//   torchrun --no-python --nproc-per-node 4 build/recipe FOLDER [STEPS]
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/dial/dial.h"
#include "tesserae/dial/facts.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/monitor/monitor.h"
#include "tesserae/tesserae.h"

namespace {

constexpr int64_t inputs = 32, global_batch = 96;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : wide(register_module("wide", torch::nn::Linear(width, 4 * width))),
        narrow(register_module("narrow", torch::nn::Linear(4 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + narrow->forward(torch::gelu(wide->forward(x))); }
  torch::nn::Linear wide, narrow;
};

// What is a Unit is gathered, computed with and freed as one; the rest belongs to the unit around it.
struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t blocks) : head(register_module("head", torch::nn::Linear(inputs, 1))) {
    for (int64_t i = 0; i < blocks; ++i) {
      units.push_back(register_module("block" + std::to_string(i), tesserae::Unit<BlockImpl>(inputs)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& unit : units) x = unit->forward(x);
    return head->forward(x);
  }
  std::vector<tesserae::Unit<BlockImpl>> units;
  torch::nn::Linear head;
};

// This rank's rows of the batch of a step. A function of the step, so that a job that goes on reads what it would have.
at::Tensor batch_of(int64_t step, int rank, int ranks) {
  if (global_batch % ranks != 0) throw std::invalid_argument("96 rows cannot be shared by so many ranks");
  torch::manual_seed(1000 + step);
  const int64_t rows = global_batch / ranks;
  return torch::randn({global_batch, inputs}).narrow(0, rank * rows, rows);
}

void train(const std::string& folder, int64_t steps) {
  const auto fabric = tesserae::Fabric::connect(tesserae::World::from_environment());
  const int rank = fabric->rank(), ranks = fabric->size();
  torch::manual_seed(0);  // the same first values on all ranks
  tesserae::Unit<ModelImpl> model(4);
  auto sharded = tesserae::shard_model(model, fabric, {.strategy = tesserae::from_hybrid_shard_degree(ranks, ranks)});
  tesserae::AdamW optimizer(sharded, {.lr = 3e-3});

  // It goes on from the newest checkpoint, whatever number of ranks and degrees wrote it.
  int64_t step = 0;
  const auto newest = tesserae::checkpoint::load_newest(
      *fabric, folder, [&](const auto& saved) { tesserae::checkpoint::load_model(saved, sharded, &optimizer); });
  if (newest) {
    tesserae::checkpoint::publish_model(sharded);
    step = newest->step();
  }
  tesserae::checkpoint::Saver saver(fabric, {.folder = folder, .keep = 2, .asynchronous = true});

  // `tesserae watch FOLDER` and `tesserae dial FOLDER --degree 2` find it there.
  tesserae::dial::Dial dial(fabric, sharded.setting(),
                            {.facts = tesserae::dial::facts_of(sharded.engine()), .folder = folder});
  tesserae::monitor::Monitor monitor(fabric, {.folder = folder, .job = {{"source", "recipe"}, {"steps", steps}}});
  monitor.watch(sharded.engine());

  while (step < steps) {
    const auto began = std::chrono::steady_clock::now();
    monitor.timer().enter(tesserae::monitor::Stage::data);
    const at::Tensor x = batch_of(step, rank, ranks);
    monitor.timer().enter(tesserae::monitor::Stage::forward);
    const at::Tensor loss = (model->forward(x) - x.sum(1, /*keepdim=*/true)).square().mean();
    loss.backward();
    saver.wait_copied();  // what the optimizer writes is not being copied any more
    monitor.timer().enter(tesserae::monitor::Stage::optimizer);
    std::vector<double> sums = {loss.item<double>()};
    const auto result = optimizer.step({.clip_norm = 1.0, .also_sum = &sums});
    optimizer.zero_grad();
    monitor.timer().end_step(++step);

    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    if (const auto to = dial.at_step_edge(step, seconds)) {
      saver.wait_copied();
      try {
        dial.changed(sharded.turn(*to));
        monitor.set_job("degrees", tesserae::dial::to_json(to->degrees));
      } catch (const tesserae::InvalidArgument& error) {  // of all ranks, and nothing has changed
        dial.refused(error.what());
      } catch (const tesserae::OutOfMemory& error) {
        dial.refused(error.what());
      }
    }
    if (step % 20 == 0 || step == steps) {
      saver.save({.step = step,
                  .layout = {ranks, sharded.setting().degrees},
                  .axes = {},
                  .pieces = tesserae::checkpoint::model_pieces(sharded, &optimizer)});
    }
    if (rank == 0) {
      std::printf("step %lld: loss %.6f, gradient norm %.4f, sharded over %d\n", static_cast<long long>(step),
                  sums[0] / ranks, result.norm, sharded.setting().degrees.parameters);
      std::fflush(stdout);
    }
  }
  saver.finish();
  monitor.end("done");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: recipe FOLDER [STEPS]\n");
    return 2;
  }
  try {
    train(argv[1], argc > 2 ? std::stoll(argv[2]) : 100);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "recipe: %s\n", error.what());
    return 1;
  }
  return 0;
}
