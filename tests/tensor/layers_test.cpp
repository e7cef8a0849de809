#include "tesserae/tensor/layers.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <gmock/gmock.h>

#include "tesserae/base/error.h"
#include "tests/tensor/ranks.h"

namespace tesserae::tensor {
namespace {

using testing::expect_close;
using testing::fill;
using testing::leaf;
using testing::numbers;
using testing::piece;
using testing::run_parallel;
using testing::whole_of;

const LayerOptions options_for(const ParallelPtr& parallel, int64_t sequence = no_sequence) {
  return {parallel, sequence, at::TensorOptions().dtype(at::kDouble)};
}

TEST(Layers, HoldTheirPartsOfTheSameWholeTensors) {
  for (const int ranks : {1, 2, 3}) {
    run_parallel(ranks, [](const ParallelPtr& parallel) {
      ColumnLinear column(6, 12, options_for(parallel), /*bias=*/true);
      RowLinear row(12, 6, options_for(parallel), /*bias=*/true);
      VocabularyEmbedding table(7, 6, options_for(parallel));
      torch::nn::Module model;
      model.register_module("column", column.ptr());
      model.register_module("row", row.ptr());
      model.register_module("table", table.ptr());
      fill_parameters(model, fill);
      EXPECT_TRUE(column->weight.equal(piece(whole_of("column.weight", {12, 6}), 0, *parallel)));
      EXPECT_TRUE(column->bias.equal(piece(whole_of("column.bias", {12}), 0, *parallel)));
      EXPECT_TRUE(row->weight.equal(piece(whole_of("row.weight", {6, 12}), 1, *parallel)));
      EXPECT_TRUE(row->bias.equal(whole_of("row.bias", {6})));
      const int64_t rows = (7 + parallel->size() - 1) / parallel->size();
      EXPECT_EQ(table->weight.size(0), rows);
      const int64_t begin = parallel->index() * rows, real = std::min<int64_t>(rows, 7 - begin);
      EXPECT_TRUE(table->weight.narrow(0, 0, real).equal(whole_of("table.weight", {7, 6}).narrow(0, begin, real)));
      EXPECT_EQ(table->weight.narrow(0, real, rows - real).abs().sum().item<double>(), 0) << "padding";
    });
  }
}

TEST(Layers, ColumnThenRowIsAnMlp) {
  const auto body = [](const ParallelPtr& parallel) {
    for (const int64_t sequence : {no_sequence, int64_t{1}}) {
      ColumnLinear column(6, 12, options_for(parallel, sequence), /*bias=*/true);
      RowLinear row(12, 6, options_for(parallel, sequence), /*bias=*/true);
      fill_parameters(*column, fill);
      fill_parameters(*row, fill);
      const at::Tensor x = numbers({2, 8, 6}, 1);
      const at::Tensor own = sequence == no_sequence ? x : piece(x, 1, *parallel);
      const at::Tensor y = row(column(own).relu());
      const at::Tensor hidden = x.matmul(whole_of("weight", {12, 6}).t()).add(whole_of("bias", {12})).relu();
      const at::Tensor expected = hidden.matmul(whole_of("weight", {6, 12}).t()).add(whole_of("bias", {6}));
      expect_close(y, sequence == no_sequence ? expected : piece(expected, 1, *parallel), "y");
    }
  };
  for (const int ranks : {1, 2, 4}) run_parallel(ranks, body);
}

TEST(Layers, ResultsMayBeChangedInPlace) {
  run_parallel(2, [](const ParallelPtr& parallel) {
    for (const int64_t sequence : {no_sequence, int64_t{1}}) {
      ColumnLinear column(6, 12, options_for(parallel, sequence), /*bias=*/true);
      RowLinear row(12, 6, options_for(parallel, sequence), /*bias=*/true);
      fill_parameters(*column, fill);
      fill_parameters(*row, fill);
      const at::Tensor x = numbers({2, 8, 6}, 1), own = sequence == no_sequence ? x : piece(x, 1, *parallel);
      const at::Tensor apart = leaf(own), in_place = leaf(own);
      row(column(apart).relu()).add(apart).square().sum().backward();
      row(column(in_place).relu_()).add_(in_place).square().sum().backward();
      expect_close(in_place.grad(), apart.grad(), "gradient of x");
    }
  });
}

TEST(Layers, GatheringCutsPaddingOff) {
  run_parallel(3, [](const ParallelPtr& parallel) {
    ColumnLinear column(6, 7, options_for(parallel), /*bias=*/false, /*gather_output=*/true);
    fill_parameters(*column, fill);
    const at::Tensor x = numbers({2, 6}, 1);
    expect_close(column(x), x.matmul(whole_of("weight", {7, 6}).t()), "y");
  });
}

TEST(Layers, ARowLayerCanCutARepeatedInputItself) {
  run_parallel(3, [](const ParallelPtr& parallel) {
    RowLinear row(12, 6, options_for(parallel), /*bias=*/true, /*scatter_input=*/true);
    fill_parameters(*row, fill);
    const at::Tensor x = leaf(numbers({2, 12}, 1)), own = leaf(x);
    const at::Tensor expected = x.matmul(whole_of("weight", {6, 12}).t()).add(whole_of("bias", {6}));
    const at::Tensor y = row(own);
    expect_close(y, expected, "y");
    expected.backward(numbers({2, 6}, 2));
    y.backward(numbers({2, 6}, 2));
    expect_close(own.grad(), x.grad(), "gradient of x: repeated");
  });
}

TEST(Layers, LayerNormsOfASplitSequenceHaveTheWholeGradient) {
  run_parallel(4, [](const ParallelPtr& parallel) {
    const at::Tensor weight = leaf(whole_of("weight", {6})), bias = leaf(whole_of("bias", {6}));
    const at::Tensor x = leaf(numbers({2, 8, 6}, 1));
    const at::Tensor expected = at::layer_norm(x, {6}, weight, bias, 1e-5);
    expected.backward(numbers({2, 8, 6}, 2));
    for (const int64_t sequence : {no_sequence, int64_t{1}}) {
      LayerNorm norm(6, 1e-5, options_for(parallel, sequence));
      fill_parameters(*norm, fill);
      const auto own = [&](const at::Tensor& t) { return sequence == no_sequence ? t : piece(t, 1, *parallel); };
      const at::Tensor input = leaf(own(x)), y = norm(input);
      expect_close(y, own(expected), "y");
      y.backward(own(numbers({2, 8, 6}, 2)));
      expect_close(input.grad(), own(x.grad()), "gradient of x");
      expect_close(norm->weight.grad(), weight.grad(), "gradient of the weight");
      expect_close(norm->bias.grad(), bias.grad(), "gradient of the bias");
    }
  });
}

TEST(Layers, NormsOfASplitSequenceHaveTheWholeGradient) {
  run_parallel(4, [](const ParallelPtr& parallel) {
    const at::Tensor weight = leaf(whole_of("weight", {6})), x = leaf(numbers({2, 8, 6}, 1));
    at::rms_norm(x, {6}, weight, 1e-5).backward(numbers({2, 8, 6}, 2));
    for (const int64_t sequence : {no_sequence, int64_t{1}}) {
      RmsNorm norm(6, 1e-5, options_for(parallel, sequence));
      fill_parameters(*norm, fill);
      const auto own = [&](const at::Tensor& t) { return sequence == no_sequence ? t : piece(t, 1, *parallel); };
      const at::Tensor input = leaf(own(x));
      norm(input).backward(own(numbers({2, 8, 6}, 2)));
      expect_close(input.grad(), own(x.grad()), "gradient of x");
      expect_close(norm->weight.grad(), weight.grad(), "gradient of the weight");
      const at::Tensor everyones = gather_from(norm->weight.grad().unsqueeze(0), 0, parallel);
      for (int rank = 1; rank < 4; ++rank) EXPECT_TRUE(everyones[rank].equal(everyones[0])) << "to the bit";
    }
  });
}

template <class Body>
std::string complaint(const Body& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(Layers, ImpossibleDegreesNameThoseThatWouldDo) {
  run_parallel(4, [](const ParallelPtr& parallel) {
    EXPECT_EQ(heads_of_rank(8, 4, *parallel).query, 2);
    EXPECT_EQ(heads_of_rank(8, 4, *parallel).key_value, 1);
    EXPECT_THAT(complaint([&] { heads_of_rank(6, 6, *parallel); }), ::testing::HasSubstr("would do: 1, 2, 3, 6"));
    EXPECT_THAT(complaint([&] { heads_of_rank(32, 2, *parallel); }), ::testing::HasSubstr("would do: 1, 2"));
    EXPECT_THAT(complaint([&] { RowLinear(6, 8, options_for(parallel)); }),
                ::testing::HasSubstr("would do: 1, 2, 3, 6"));
  });
}

}  // namespace
}  // namespace tesserae::tensor
