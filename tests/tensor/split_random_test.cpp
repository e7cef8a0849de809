#include "tesserae/tensor/split_random.h"

#include <ATen/Context.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include "tesserae/tensor/functions.h"
#include "tests/support/ranks.h"
#include "tests/tensor/ranks.h"

namespace tesserae::testing {
namespace {

// Default generators belong to processes, so these ranks are processes.
RANK_MAIN(tensor_split_random) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const auto parallel = std::make_shared<const tensor::Parallel>(
      std::make_shared<comm::MeshFabric>(fabric, mesh::Mesh(fabric->size(), {.tensor = fabric->size()})));
  const auto of_all = [&] { return tensor::gather_from(at::rand({1, 32}), 0, parallel); };
  const auto draw = [&](uint64_t seed) {
    tensor::SplitRandom random(*parallel, seed, at::kCPU);
    at::manual_seed(7);
    random.begin();
    EXPECT_TRUE(random.inside());
    const at::Tensor inside = of_all();
    random.begin();  // does nothing
    random.end();
    random.end();
    EXPECT_FALSE(random.inside());
    const at::Tensor outside = of_all();
    random.begin();
    const at::Tensor again = of_all();
    random.end();
    return std::vector<at::Tensor>{inside, outside, again};
  };
  const auto first = draw(1), second = draw(1), other = draw(2);
  EXPECT_FALSE(first[0][0].equal(first[0][1])) << "inside, ranks draw different numbers";
  EXPECT_TRUE(first[1][0].equal(first[1][1])) << "outside, the same";
  EXPECT_FALSE(first[2].equal(first[0])) << "the next time, other numbers";
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(first[i].equal(second[i])) << "seeds say all, " << i;
  EXPECT_FALSE(other[0].equal(first[0])) << "another seed of the job";
  EXPECT_TRUE(other[1].equal(first[1])) << "which does not touch what is drawn outside";
}

TEST(SplitRandom, RanksDrawTheirOwnNumbersInsideAndTheSameOutside) {
  const auto results = run_ranks("tensor_split_random", 2);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace
}  // namespace tesserae::testing
