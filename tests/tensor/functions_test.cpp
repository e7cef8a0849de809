#include "tesserae/tensor/functions.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include "tesserae/base/error.h"
#include "tests/tensor/ranks.h"

namespace tesserae::tensor {
namespace {

using testing::expect_close;
using testing::leaf;
using testing::numbers;
using testing::piece;
using testing::run_parallel;

// Every rank has whole numbers of its own: partial tensors.
at::Tensor partial(const Parallel& parallel, at::IntArrayRef shape) {
  return numbers(shape, 10 + static_cast<uint64_t>(parallel.index()));
}

at::Tensor sum_of_partials(const Parallel& parallel, at::IntArrayRef shape) {
  at::Tensor sum = numbers(shape, 10);
  for (int rank = 1; rank < parallel.size(); ++rank) sum = sum + numbers(shape, 10 + static_cast<uint64_t>(rank));
  return sum;
}

class Functions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Functions, ::testing::Values(1, 2, 3, 4));

TEST_P(Functions, CopyAndReduceAreAdjoint) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    const at::Tensor x = leaf(numbers({3, 4}, 1));
    const at::Tensor y = copy_to_parallel(x, parallel);
    EXPECT_TRUE(y.equal(x));
    y.backward(partial(*parallel, {3, 4}));
    expect_close(x.grad(), sum_of_partials(*parallel, {3, 4}), "gradient of copy");

    const at::Tensor p = leaf(partial(*parallel, {3, 4}));
    const at::Tensor sum = reduce_from(p, parallel);
    expect_close(sum, sum_of_partials(*parallel, {3, 4}), "reduce");
    EXPECT_TRUE(p.equal(partial(*parallel, {3, 4}))) << "the input is only read";
    sum.backward(numbers({3, 4}, 2));
    expect_close(p.grad(), numbers({3, 4}, 2), "gradient of reduce");
  });
}

TEST_P(Functions, LinearLayersComputeAsAutocastSays) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    const auto fp32 = [](const at::Tensor& values) { return leaf(values.to(at::kFloat)); };
    const at::Tensor x = fp32(numbers({5, 8}, 1)), down = fp32(numbers({4, 6}, 3)), up = fp32(numbers({6, 8}, 2));
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor y = row_linear(column_linear(x, up, {}, parallel), down, {}, parallel);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(y.scalar_type(), at::autocast::get_autocast_dtype(at::kCPU));
    y.sum().backward();
    for (const at::Tensor& tensor : {x, up, down}) EXPECT_EQ(tensor.grad().scalar_type(), at::kFloat);
  });
}

TEST_P(Functions, GatherAndScatterAreAdjoint) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    for (const int64_t dim : {0, 1, 2}) {
      const at::Tensor whole = numbers({12, 12, 12}, 1);
      const at::Tensor own = leaf(piece(whole, dim, *parallel));
      const at::Tensor gathered = gather_from(own, dim, parallel);
      EXPECT_TRUE(gathered.equal(whole));
      gathered.backward(numbers({12, 12, 12}, 2));
      EXPECT_TRUE(own.grad().equal(piece(numbers({12, 12, 12}, 2), dim, *parallel)));

      const at::Tensor x = leaf(whole);
      const at::Tensor cut = scatter_to(x, dim, parallel);
      EXPECT_TRUE(cut.equal(piece(whole, dim, *parallel)));
      cut.backward(piece(numbers({12, 12, 12}, 3), dim, *parallel));
      EXPECT_TRUE(x.grad().equal(numbers({12, 12, 12}, 3)));
    }
  });
}

TEST_P(Functions, SequencesAreGatheredAndSummed) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    for (const int64_t dim : {0, 1}) {
      const std::vector<int64_t> shape{12, 24, 2};
      const at::Tensor own = leaf(piece(numbers(shape, 1), dim, *parallel));
      const at::Tensor gathered = gather_sequence(own, dim, parallel);
      EXPECT_TRUE(gathered.equal(numbers(shape, 1)));
      gathered.backward(partial(*parallel, shape));
      expect_close(own.grad(), piece(sum_of_partials(*parallel, shape), dim, *parallel), "gradient of gather");

      const at::Tensor p = leaf(partial(*parallel, shape));
      const at::Tensor cut = reduce_scatter_sequence(p, dim, parallel);
      expect_close(cut, piece(sum_of_partials(*parallel, shape), dim, *parallel), "reduce-scatter");
      cut.backward(piece(numbers(shape, 2), dim, *parallel));
      EXPECT_TRUE(p.grad().equal(numbers(shape, 2)));
    }
  });
}

struct LinearCase {
  int ranks;
  int64_t sequence;     // no_sequence, 0 or 1
  int64_t piece_bytes;  // 0: in one piece
};

std::vector<LinearCase> linear_cases() {
  std::vector<LinearCase> cases;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t sequence : {no_sequence, int64_t{0}, int64_t{1}}) {
      for (const int64_t bytes : {0, 500}) cases.push_back({ranks, sequence, bytes});
    }
  }
  return cases;
}

class Linears : public ::testing::TestWithParam<LinearCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, Linears, ::testing::ValuesIn(linear_cases()), [](const auto& info) {
  const LinearCase& c = info.param;
  return cat(c.ranks, "ranks", c.sequence == no_sequence ? "" : cat("_sequence", c.sequence),
             c.piece_bytes > 0 ? "_pieces" : "");
});

const std::vector<int64_t> x_shape{12, 24, 6};

at::Tensor part_of_sequence(const at::Tensor& x, int64_t sequence, const Parallel& parallel) {
  return sequence == no_sequence ? x : piece(x, sequence, parallel);
}

TEST_P(Linears, ColumnEqualsOneProcess) {
  const auto c = GetParam();
  const auto body = [c](const ParallelPtr& parallel) {
    // Two weights that read the same x.
    const at::Tensor x = leaf(numbers(x_shape, 1)), w = leaf(numbers({24, 6}, 2)), b = leaf(numbers({24}, 3));
    const at::Tensor v = leaf(numbers({12, 6}, 4)), a = leaf(numbers({12}, 5));
    const at::Tensor y = at::linear(x, w, b), z = at::linear(x, v, a);
    const at::Tensor dy = numbers({12, 24, 24}, 6), dz = numbers({12, 24, 12}, 7);
    torch::autograd::backward({y, z}, {dy, dz});

    const at::Tensor xp = leaf(part_of_sequence(x, c.sequence, *parallel));
    const at::Tensor wp = leaf(piece(w, 0, *parallel)), bp = leaf(piece(b, 0, *parallel));
    const at::Tensor vp = leaf(piece(v, 0, *parallel)), ap = leaf(piece(a, 0, *parallel));
    const auto both = column_linear(xp, {wp, vp}, {bp, ap}, parallel, c.sequence);
    expect_close(both[0], piece(y, 2, *parallel), "y");
    expect_close(both[1], piece(z, 2, *parallel), "z");
    torch::autograd::backward({both[0], both[1]}, {piece(dy, 2, *parallel), piece(dz, 2, *parallel)});
    expect_close(xp.grad(), part_of_sequence(x.grad(), c.sequence, *parallel), "gradient of x");
    expect_close(wp.grad(), piece(w.grad(), 0, *parallel), "gradient of w");
    expect_close(bp.grad(), piece(b.grad(), 0, *parallel), "gradient of b");
    expect_close(vp.grad(), piece(v.grad(), 0, *parallel), "gradient of v");
    expect_close(ap.grad(), piece(a.grad(), 0, *parallel), "gradient of a");
  };
  run_parallel(c.ranks, body, c.piece_bytes);
}

TEST_P(Linears, RowEqualsOneProcess) {
  const auto c = GetParam();
  const auto body = [c](const ParallelPtr& parallel) {
    const at::Tensor x = leaf(numbers({12, 24, 24}, 1)), w = leaf(numbers({6, 24}, 2)), b = leaf(numbers({6}, 3));
    const at::Tensor y = at::linear(x, w, b), dy = numbers({12, 24, 6}, 4);
    y.backward(dy);

    const at::Tensor xp = leaf(piece(x, 2, *parallel)), wp = leaf(piece(w, 1, *parallel)), bp = leaf(b);
    const at::Tensor yp = row_linear(xp, wp, bp, parallel, c.sequence);
    expect_close(yp, part_of_sequence(y, c.sequence, *parallel), "y");
    yp.backward(part_of_sequence(dy, c.sequence, *parallel));
    expect_close(xp.grad(), piece(x.grad(), 2, *parallel), "gradient of x");
    expect_close(wp.grad(), piece(w.grad(), 1, *parallel), "gradient of w");
    expect_close(bp.grad(), b.grad(), "gradient of b");
  };
  run_parallel(c.ranks, body, c.piece_bytes);
}

TEST_P(Linears, FrozenWeightsAndInputsCostNothing) {
  const auto c = GetParam();
  const auto body = [c](const ParallelPtr& parallel) {
    const at::Tensor x = part_of_sequence(numbers(x_shape, 1), c.sequence, *parallel);
    const at::Tensor w = piece(numbers({24, 6}, 2), 0, *parallel).contiguous();
    const at::Tensor v = leaf(piece(numbers({6, 24}, 3), 1, *parallel));
    const at::Tensor y = row_linear(column_linear(x, w, {}, parallel, c.sequence), v, {}, parallel, c.sequence);
    y.sum().backward();
    EXPECT_TRUE(v.grad().defined());
    EXPECT_FALSE(w.grad().defined());

    const at::Tensor lively = leaf(x);
    const auto before = parallel->group().counters();
    column_linear(lively, w, {}, parallel, c.sequence).sum().backward();
    const auto after = parallel->group().counters();
    EXPECT_TRUE(lively.grad().defined());
    const bool gathers = c.sequence != no_sequence && c.ranks > 1 && c.piece_bytes == 0;
    if (gathers) {
      EXPECT_EQ(after.all_gather.calls - before.all_gather.calls, 1U) << "x is not gathered for the weight";
    }
  };
  run_parallel(c.ranks, body, c.piece_bytes);
}

TEST_P(Functions, EmbeddingEqualsOneProcess) {
  run_parallel(GetParam(), [](const ParallelPtr& parallel) {
    const int64_t ranks = parallel->size(), rows = (19 + ranks - 1) / ranks;
    const at::Tensor tokens =
        at::randint(19, {2, 12}, at::detail::createCPUGenerator(5), at::TensorOptions().dtype(at::kLong));
    at::Tensor table = at::zeros({rows * ranks, 4}, at::kDouble);
    table.narrow(0, 0, 19).copy_(numbers({19, 4}, 1));
    const at::Tensor whole = leaf(table);
    const at::Tensor expected = at::embedding(whole, tokens);
    const at::Tensor dy = numbers({2, 12, 4}, 2);
    expected.backward(dy);
    for (const int64_t sequence : {no_sequence, int64_t{1}}) {
      const at::Tensor part = leaf(piece(whole, 0, *parallel));
      const at::Tensor y = vocabulary_embedding(tokens, part, parallel, 19, sequence);
      EXPECT_TRUE(y.equal(part_of_sequence(expected, sequence, *parallel)));
      y.backward(part_of_sequence(dy, sequence, *parallel));
      expect_close(part.grad(), piece(whole.grad(), 0, *parallel), "gradient of the table");
    }
    for (const int64_t beyond : {rows * ranks, int64_t{19}}) {  // the second may have a row, of padding
      EXPECT_ANY_THROW(vocabulary_embedding(at::full({1, 2}, beyond), leaf(piece(whole, 0, *parallel)), parallel, 19));
    }
  });
}

TEST(Function, WrongShapesAreSaidBeforeAnythingIsSent) {
  run_parallel(2, [](const ParallelPtr& parallel) {
    const at::Tensor x = numbers({3, 5, 6}, 1);
    EXPECT_THROW(scatter_to(x, 0, parallel), InvalidArgument);
    EXPECT_THROW(gather_from(x, 3, parallel), InvalidArgument);
    EXPECT_THROW(reduce_scatter_sequence(x, 1, parallel), InvalidArgument);
    EXPECT_THROW(column_linear(x, numbers({4, 5}, 2), {}, parallel), InvalidArgument);
    EXPECT_THROW(column_linear(x, numbers({4, 6}, 2), {}, parallel, 2), InvalidArgument);
    EXPECT_THROW(row_linear(x, numbers({4, 6}, 2), {}, parallel, 1), InvalidArgument) << "5 tokens on 2 ranks";
    EXPECT_EQ(parallel->group().counters().all_gather.calls, 0U);
  });
}

TEST(Function, SecondDerivativesAreRefused) {
  run_parallel(2, [](const ParallelPtr& parallel) {
    const at::Tensor x = leaf(numbers({2}, 1));
    const at::Tensor y = copy_to_parallel(x, parallel).square().sum();
    EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true), InvalidArgument);
  });
}

}  // namespace
}  // namespace tesserae::tensor
