#include "tesserae/tensor/product.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace tesserae::tensor {
namespace {

// Small integers: sums of their products are exact in fp32, and a few of them are not in bf16.
at::Tensor integers(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randint(-8, 9, shape).to(dtype);
}

struct Shape {
  int64_t m, k, n;
};

class Product : public ::testing::TestWithParam<Shape> {};

TEST_P(Product, RoundsTheExactResultOnceWhateverTheStridesAndBlocks) {
  const auto [m, k, n] = GetParam();
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const int transposed : {0, 1, 2, 3, 4, 5, 6, 7}) {
      const auto matrix = [&](int64_t rows, int64_t columns, int bit) {
        return (transposed & bit) != 0 ? integers({columns, rows}, dtype).t() : integers({rows, columns}, dtype);
      };
      const at::Tensor a = matrix(m, k, 1), b = matrix(k, n, 2), before = matrix(m, n, 4);
      const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
      for (const int64_t block_bytes : {1, 2000, 1 << 20}) {
        const at::Tensor out = before.clone();
        widened_product(out, a, b, /*kept=*/false, block_bytes);
        EXPECT_TRUE(at::equal(out, exact.to(dtype))) << dtype << " " << transposed << " " << block_bytes;
        out.copy_(before);
        widened_product(out, a, b, /*kept=*/true, block_bytes);
        EXPECT_TRUE(at::equal(out, exact.add(before.to(at::kDouble)).to(dtype))) << dtype << " " << transposed;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Product,
                         ::testing::Values(Shape{5, 7, 3}, Shape{3, 70, 50}, Shape{60, 5, 9}, Shape{1, 33, 1},
                                           Shape{4, 0, 6}, Shape{0, 3, 2}));

// On every CPU, and into a part of a larger tensor.
TEST(ProductOf, AllDtypesIsTheOneOfTorchToTheirRounding) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor a = at::randn({9, 40}).to(dtype), b = at::randn({40, 17}).to(dtype);
    const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
    const double unit = dtype == at::kBFloat16 ? 4e-3 : dtype == at::kHalf ? 5e-4 : 1e-6;
    const auto near = [&](const at::Tensor& got, const at::Tensor& wanted) {
      EXPECT_EQ(got.scalar_type(), dtype);
      EXPECT_LE(got.to(at::kDouble).sub(wanted).abs().max().item().toDouble(), 60 * unit) << dtype;
    };
    near(product(a, b), exact);
    const at::Tensor room = at::empty({2, 9, 34}, a.options());
    const at::Tensor place = room[1].narrow(1, 8, 17);
    product_to(place, a, b);
    near(place, exact);
    add_product(place, a, b);
    near(place, exact.mul(2));
  }
}

TEST(ProductOf, DifferentDtypesIsRefusedOnEveryCpu) {
  EXPECT_THROW(product(at::randn({2, 3}).to(at::kBFloat16), at::randn({3, 2})), c10::Error);
}

}  // namespace
}  // namespace tesserae::tensor
