#include "tesserae/tensor/dropout.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "tests/tensor/ranks.h"

namespace tesserae::testing {
namespace {

using tensor::Placement;

// Default generators belong to processes, so these ranks are processes.
RANK_MAIN(tensor_dropout) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const auto parallel = std::make_shared<const tensor::Parallel>(
      std::make_shared<comm::MeshFabric>(fabric, mesh::Mesh(fabric->size(), {.tensor = fabric->size()})));
  at::manual_seed(7);
  const at::Tensor x = at::ones({64, 64});
  const auto all_masks = [&](Placement place) {
    const at::Tensor mine = tensor::dropout(x, 0.25, true, place, parallel);
    return tensor::gather_from(mine.unsqueeze(0), 0, parallel);
  };
  const at::Tensor repeated = all_masks(Placement::repeated), split = all_masks(Placement::split);
  EXPECT_TRUE(repeated[0].equal(repeated[1]));
  EXPECT_FALSE(split[0].equal(split[1]));
  EXPECT_FALSE(split[0].equal(all_masks(Placement::split)[0])) << "the next call draws other numbers";
  const at::Tensor after = all_masks(Placement::repeated);
  EXPECT_TRUE(after[0].equal(after[1])) << "split masks leave the default generators alike";
  for (const auto& mask : {split[0], split[1], repeated[0]}) {
    EXPECT_NEAR(mask.eq(0).sum().item<double>() / 4096, 0.25, 0.03);
    EXPECT_NEAR(mask.max().item<double>(), 1 / 0.75, 1e-6);
  }
  at::manual_seed(7);
  EXPECT_TRUE(all_masks(Placement::repeated).equal(repeated));
  EXPECT_TRUE(all_masks(Placement::split).equal(split)) << "the seed says all masks";
  EXPECT_TRUE(tensor::dropout(x, 0.25, false, Placement::split, parallel).equal(x));
}

TEST(Dropout, MasksAreAlikeWhereRepeatedAndDifferWhereSplit) {
  const auto results = run_ranks("tensor_dropout", 2);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace
}  // namespace tesserae::testing
