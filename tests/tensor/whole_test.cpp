#include "tesserae/tensor/whole.h"

#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tesserae/shard/split_parameters.h"
#include "tests/tensor/ranks.h"

namespace tesserae::testing {
namespace {

TEST(WholeOf, IsTheReverseOfPartOf) {
  run_parallel(3, [](const std::shared_ptr<tensor::Parallel>& parallel) {
    for (const auto& [dim, blocks] : {std::pair{0, 1}, {1, 1}, {1, 2}, {2, 3}}) {
      const at::Tensor whole = numbers({6, 12, 18}, 1);
      const mesh::Split split = parallel->split(dim, blocks);
      const at::Tensor part = shard::part_of(whole, split);
      EXPECT_TRUE(tensor::whole_of(part, split, whole.sizes().vec(), *parallel).equal(whole))
          << dim << ", " << blocks << " blocks";
    }
    // Seven rows on three ranks: the last part ends with padding.
    const at::Tensor whole = numbers({7, 2}, 2);
    const mesh::Split split = parallel->split(0);
    EXPECT_TRUE(tensor::whole_of(shard::part_of(whole, split), split, {7, 2}, *parallel).equal(whole));
  });
}

TEST(WholeOf, APartOfSomethingElseIsRefused) {
  run_parallel(2, [](const std::shared_ptr<tensor::Parallel>& parallel) {
    const at::Tensor part = numbers({3, 4}, 1);
    EXPECT_THROW(tensor::whole_of(part, parallel->split(0), {8, 4}, *parallel), InvalidArgument);
    EXPECT_THROW(tensor::whole_of(part, {0, 4, parallel->index()}, {12, 4}, *parallel), InvalidArgument);
    EXPECT_TRUE(tensor::whole_of(part, {}, {3, 4}, *parallel).equal(part)) << "no split: nothing to put together";
  });
}

}  // namespace
}  // namespace tesserae::testing
