#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "tesserae/optim/optimizer.h"
#include "tests/optim/cut_model.h"

namespace tesserae::testing {

using MakeOurs = std::function<std::unique_ptr<optim::Optimizer>(std::shared_ptr<optim::Target>)>;
using MakeTheirs = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> matrices,
                                                                          std::vector<at::Tensor> vectors)>;

/// Trains one model for six steps with ours on shards and with torch's on whole tensors, with the same gradients. In
/// steps 2 and 3 the first unit gets no gradient, which must leave its state alone.
inline void expect_like_torch(int chunks, size_t parameters_per_unit, const MakeOurs& ours, const MakeTheirs& theirs) {
  const std::vector<std::vector<int64_t>> shapes = {{7}, {5, 9}, {3}, {2}, {11, 3}, {2, 3, 5}, {1}, {4, 4}};
  std::vector<NamedParameter> parameters;
  std::vector<at::Tensor> whole, matrices, vectors;
  for (size_t i = 0; i < shapes.size(); ++i) {
    parameters.push_back({"p" + std::to_string(i), at::randn(shapes[i])});
    whole.push_back(parameters.back().value.clone().requires_grad_());
    (shapes[i].size() >= 2 ? matrices : vectors).push_back(whole.back());
  }
  CutModel model(parameters, chunks, parameters_per_unit);
  const auto reference = theirs(matrices, vectors);
  std::vector<std::unique_ptr<optim::Optimizer>> optimizers;
  std::vector<std::vector<int>> published(model.ranks());
  for (size_t rank = 0; rank < model.ranks(); ++rank) {
    auto publish = [&published, rank](int index) { published[rank].push_back(index); };
    optimizers.push_back(ours(optim::target_of(model.rank(rank), publish)));
  }

  for (int step = 0; step < 6; ++step) {
    std::vector<at::Tensor> gradients;
    std::vector<int> expected;
    const bool first_unit_is_idle = step == 2 || step == 3;
    for (int unit = first_unit_is_idle ? 1 : 0; unit < model.units(); ++unit) expected.push_back(unit);
    for (size_t i = 0; i < shapes.size(); ++i) {
      const bool idle = first_unit_is_idle && i < parameters_per_unit;
      gradients.push_back(idle ? at::Tensor() : at::randn(shapes[i]));
      whole[i].mutable_grad() = idle ? at::Tensor() : gradients.back().clone();
    }
    model.set_gradients(gradients);
    for (size_t rank = 0; rank < model.ranks(); ++rank) {
      published[rank].clear();
      optimizers[rank]->step({.measure_norm = false});
      EXPECT_EQ(published[rank], expected) << "rank " << rank << " step " << step;
    }
    reference->step();

    const auto got = model.gather();
    for (size_t i = 0; i < whole.size(); ++i) {
      const double difference = got[i].sub(whole[i].detach()).abs().max().item<double>();
      EXPECT_LT(difference, 2e-6) << parameters[i].name << " chunks " << chunks << " step " << step;
    }
  }
}

}  // namespace tesserae::testing
