#include "tesserae/experts/grouped_linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "tesserae/base/error.h"
#include "tests/experts/ranks.h"

namespace tesserae::experts {
namespace {

using testing::expect_close;
using testing::leaf;
using testing::numbers;

at::Tensor counts_of(const std::vector<int64_t>& counts) {
  return at::tensor(counts, at::kLong);
}

TEST(GroupedLinear, EqualsAProductForEachGroup) {
  for (const std::vector<int64_t>& rows :
       {std::vector<int64_t>{3, 1, 4, 2}, {0, 5, 0, 5}, {0, 0, 10, 0}, {0, 0, 0, 0}, {10}}) {
    const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    const auto groups = static_cast<int64_t>(rows.size());
    const at::Tensor x = leaf(numbers({sum, 6}, 1)), w = leaf(numbers({groups, 5, 6}, 2)), dy = numbers({sum, 5}, 3);
    const at::Tensor own_x = leaf(x), own_w = leaf(w);
    std::vector<at::Tensor> parts;
    int64_t begin = 0;
    for (int64_t g = 0; g < groups; begin += rows[static_cast<size_t>(g++)]) {
      parts.push_back(x.narrow(0, begin, rows[static_cast<size_t>(g)]).matmul(w[g].t()));
    }
    const at::Tensor expected = at::cat(parts);
    expected.backward(dy);

    const at::Tensor y = grouped_linear(own_x, own_w, counts_of(rows));
    y.backward(dy);
    ASSERT_TRUE(own_w.grad().defined()) << "the gradient of experts without tokens is zero, not missing";
    ASSERT_TRUE(own_x.grad().defined());
    if (sum > 0) {
      expect_close(y, expected, "y");
      expect_close(own_x.grad(), x.grad(), "gradient of x");
    }
    for (int64_t g = 0; g < groups; ++g) {
      if (rows[static_cast<size_t>(g)] == 0) {
        EXPECT_EQ(own_w.grad()[g].abs().max().item<double>(), 0) << "group " << g;
      } else {
        expect_close(own_w.grad()[g], w.grad()[g], "gradient of a weight");
      }
    }
  }
}

TEST(GroupedLinear, LowPrecisionIsRoundedOnce) {
  const at::Tensor x = numbers({64, 48}, 1).to(at::kBFloat16), w = numbers({3, 32, 48}, 2).to(at::kBFloat16);
  const at::Tensor counts = counts_of({40, 0, 24});
  const at::Tensor y = grouped_linear(x, w, counts);
  const at::Tensor exact = grouped_linear(x.to(at::kDouble), w.to(at::kDouble), counts);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_LE((y.to(at::kDouble) - exact).abs().max().item<double>(), 0.005 * exact.abs().max().item<double>());
}

TEST(GroupedLinear, RefusesWhatDoesNotGoTogether) {
  const at::Tensor x = numbers({4, 6}, 1), w = numbers({2, 5, 6}, 2);
  EXPECT_THROW(grouped_linear(x, w, counts_of({1, 2})), InvalidArgument);
  EXPECT_THROW(grouped_linear(x, w, counts_of({4})), InvalidArgument);
  EXPECT_THROW(grouped_linear(x, w, counts_of({2, 2}).to(at::kInt)), InvalidArgument);
  EXPECT_THROW(grouped_linear(x, numbers({2, 5, 7}, 2), counts_of({2, 2})), InvalidArgument);
}

TEST(GroupedLinear, IsNotDifferentiatedTwice) {
  const at::Tensor x = leaf(numbers({4, 6}, 1)), w = leaf(numbers({2, 5, 6}, 2));
  const at::Tensor y = grouped_linear(x, w, counts_of({2, 2})).sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::experts
