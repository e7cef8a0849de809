#include "tesserae/comm/same_given.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace tesserae::comm {
namespace {

TEST(SameGiven, NamesTheFirstRankWithAnotherTensor) {
  run_local(3, [](Fabric& fabric) {
    const auto other = [&](const std::vector<at::Tensor>& tensors) {
      return first_given_other(fabric.everyone(), fabric.device(), tensors);
    };
    const at::Tensor tokens = at::arange(6, at::kLong).view({2, 3}), weights = at::ones({2, 3});
    EXPECT_FALSE(other({tokens, weights, weights.gt(0)}));
    EXPECT_FALSE(other({}));
    const bool last = fabric.rank() == 2;
    for (const at::Tensor& mine : {tokens + 1, tokens.flip({1}), tokens.to(at::kDouble), tokens.gt(2)}) {
      const auto found = other({last ? mine : tokens});
      ASSERT_TRUE(found) << mine;
      EXPECT_EQ(found->rank, 2);
    }
    EXPECT_EQ(other({tokens, last ? weights * 2 : weights}).value().rank, 2);
    EXPECT_EQ(other({last ? tokens + 1 : tokens, last ? tokens : tokens + 1}).value().rank, 2) << "swapped";
    const GivenOther fewer = other({tokens.narrow(0, 0, last ? 1 : 2)}).value();
    EXPECT_EQ(fewer.elements_of_first, 6);
    EXPECT_EQ(fewer.elements, 3);
  });
}

}  // namespace
}  // namespace tesserae::comm
