#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>

#include "tesserae/base/error.h"
#include "tesserae/tensor/functions.h"
#include "tests/tensor/ranks.h"

namespace tesserae::tensor {
namespace {

using testing::leaf;
using testing::numbers;
using testing::piece;
using testing::run_parallel;

class CrossEntropy : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CrossEntropy, ::testing::Values(1, 2, 3, 4, 8));

at::Tensor some_targets(int64_t vocabulary) {
  return at::randint(vocabulary, {3, 5}, at::detail::createCPUGenerator(3), at::TensorOptions().dtype(at::kLong));
}

// 9 columns on 8 ranks: some have nothing but padding.
TEST_P(CrossEntropy, EqualsOneProcessWithPaddingAndIgnoredTargets) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    for (const int64_t vocabulary : {9, 37}) {
      const int64_t ranks = parallel->size(), width = (vocabulary + ranks - 1) / ranks;
      const at::Tensor logits = leaf(numbers({3, 5, vocabulary}, 1).mul(20).to(at::kFloat));
      at::Tensor targets = some_targets(vocabulary);
      targets[1][2].fill_(-100);
      const at::Tensor expected =
          at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten(), {}, at::Reduction::None).view({3, 5});
      const at::Tensor weights = numbers({3, 5}, 2).to(at::kFloat);
      expected.mul(weights).sum().backward();

      // Padding has whatever values; it must not count.
      const at::Tensor padded = at::constant_pad_nd(logits.detach(), {0, width * ranks - vocabulary}, 1e4);
      const at::Tensor part = leaf(piece(padded, 2, *parallel));
      const at::Tensor losses = vocabulary_cross_entropy(part, targets, vocabulary, parallel);
      EXPECT_LE((losses - expected).abs().max().item<double>(), 1e-5 * expected.abs().max().item<double>());
      EXPECT_EQ(losses[1][2].item<double>(), 0);
      losses.mul(weights).sum().backward();
      const at::Tensor gradient =
          at::constant_pad_nd(logits.grad(), {0, width * ranks - vocabulary}, 0).to(at::kDouble);
      EXPECT_LE((part.grad() - piece(gradient, 2, *parallel)).abs().max().item<double>(),
                1e-5 * logits.grad().abs().max().item<double>());
    }
  });
}

// More than a block of rows, which ends in the middle of one, and columns that do not fill a vector.
TEST_P(CrossEntropy, GoesOverManyRowsBlockByBlock) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    const int64_t tokens = 37, width = 9001 / parallel->size(), vocabulary = width * parallel->size();
    for (const int64_t rows : {int64_t{0}, tokens}) {
      const at::Tensor logits = leaf(numbers({rows, vocabulary}, 1).mul(5).to(at::kFloat));
      at::Tensor targets =
          at::randint(vocabulary, {rows}, at::detail::createCPUGenerator(3), at::TensorOptions().dtype(at::kLong));
      if (rows > 0) targets[35].fill_(-100);
      const at::Tensor expected = at::cross_entropy_loss(logits, targets, {}, at::Reduction::None);
      expected.sum().backward();
      const at::Tensor part = leaf(piece(logits.detach(), 1, *parallel));
      const at::Tensor losses = vocabulary_cross_entropy(part, targets, vocabulary, parallel);
      losses.sum().backward();
      EXPECT_TRUE(at::allclose(losses, expected, 1e-5, 1e-6)) << rows;
      EXPECT_TRUE(at::allclose(part.grad(), piece(logits.grad(), 1, *parallel), 1e-5, 1e-7)) << rows;
    }
  });
}

// As in torch, where the mean of no losses is not finite and its gradients are zero.
TEST_P(CrossEntropy, ABatchInWhichNothingCountsDoesNoHarm) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    const at::Tensor part = leaf(numbers({6, 4}, 1).to(at::kFloat));
    const at::Tensor targets = at::full({6}, -100, at::TensorOptions().dtype(at::kLong));
    const at::Tensor losses = vocabulary_cross_entropy(part, targets, 4 * parallel->size(), parallel);
    losses.sum().div(targets.ne(-100).sum()).backward();
    EXPECT_EQ(part.grad().abs().max().item<double>(), 0);
  });
}

TEST_P(CrossEntropy, LogitsAreNeverGathered) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    const at::Tensor part = leaf(numbers({15, 100}, 1).to(at::kFloat));
    const auto before = parallel->group().counters();
    vocabulary_cross_entropy(part, some_targets(100).flatten(), 100 * parallel->size(), parallel).sum().backward();
    const auto after = parallel->group().counters();
    EXPECT_EQ(after.all_gather.bytes, before.all_gather.bytes);
    const auto tokens = 15U, ranks = static_cast<unsigned>(parallel->size());
    EXPECT_EQ(after.all_reduce.bytes - before.all_reduce.bytes,
              2 * 4 * tokens * (ranks - 1) / ranks + 2 * 8 * tokens * (ranks - 1) / ranks);
  });
}

TEST(CrossEntropy, OfHalfPrecisionLogitsIsComputedInFp32) {
  run_parallel(1, [](const ParallelPtr& parallel) {
    const at::Tensor logits = numbers({3, 5, 19}, 1).to(at::kBFloat16), targets = some_targets(19);
    const at::Tensor losses = vocabulary_cross_entropy(logits, targets, 19, parallel);
    EXPECT_EQ(losses.scalar_type(), at::kFloat);
    EXPECT_TRUE(losses.equal(vocabulary_cross_entropy(logits.to(at::kFloat), targets, 19, parallel)));
    const at::Tensor part = leaf(logits);
    vocabulary_cross_entropy(part, targets, 19, parallel).sum().backward();
    EXPECT_EQ(part.grad().scalar_type(), at::kBFloat16);
  });
}

TEST(CrossEntropy, TargetsOutsideTheVocabularyAreRefusedOnAllRanks) {
  run_parallel(2, [](const ParallelPtr& parallel) {
    const at::Tensor part = numbers({3, 5, 10}, 1);
    at::Tensor targets = some_targets(19);
    targets[0][0].fill_(19);  // a column of padding
    EXPECT_THROW(vocabulary_cross_entropy(part, targets, 19, parallel), InvalidArgument);
    targets[0][0].fill_(-1);
    EXPECT_THROW(vocabulary_cross_entropy(part, targets, 19, parallel), InvalidArgument);
    EXPECT_THROW(vocabulary_cross_entropy(part[0], targets, 19, parallel), InvalidArgument);
  });
}

}  // namespace
}  // namespace tesserae::tensor
