// Gradients of linear layers and embeddings that are computed where they are reduced (autograd::gradient_destination).

#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/shard/unit.h"
#include "tesserae/tensor/functions.h"
#include "tesserae/tensor/layers.h"
#include "tests/tensor/ranks.h"

namespace tesserae::tensor {
namespace {

using shard::Statistics;
using testing::borrowed;
using testing::fill;
using testing::numbers;

constexpr int64_t width = 6;

LayerOptions one_rank() {
  return {std::make_shared<Parallel>(), no_sequence, at::TensorOptions().dtype(at::kDouble)};
}

/// Two layers with biases.
class PlainImpl : public torch::nn::Module {
 public:
  PlainImpl() {
    register_module("column", column.ptr());
    register_module("row", row.ptr());
  }
  at::Tensor forward(const at::Tensor& x) { return row(column(x).tanh()); }

  ColumnLinear column{width, 2 * width, one_rank(), /*bias=*/true};
  RowLinear row{2 * width, width, one_rank(), /*bias=*/true};
};

/// One layer that is used three times, in the middle by a backward inside of the backward.
class ReusedImpl : public torch::nn::Module {
 public:
  ReusedImpl() { register_module("layer", layer.ptr()); }
  at::Tensor forward(const at::Tensor& x) {
    const auto use = [this](const at::Tensor& input) { return layer(input).tanh(); };
    return use(autograd::recompute_in_backward(use, use(x)));
  }

  ColumnLinear layer{width, width, one_rank()};
};

class TableImpl : public torch::nn::Module {
 public:
  TableImpl() { register_module("table", table.ptr()); }
  at::Tensor forward(const at::Tensor& tokens) { return table(tokens).tanh(); }

  VocabularyEmbedding table{7, width, one_rank()};
};

class TiedImpl : public torch::nn::Module {
 public:
  TiedImpl() {
    weight_ = register_parameter("table", at::empty({7, width}, one_rank().tensors));
    register_parameter("head", weight_);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto parallel = one_rank().parallel;
    return column_linear(vocabulary_embedding(tokens, weight_, parallel, 7).tanh(), weight_, {}, parallel);
  }

 private:
  at::Tensor weight_;
};

/// One weight, of an embedding and a head. `together`: what the head brings waits for the rows where it is reduced.
template <bool together>
class TableAndHeadImpl : public torch::nn::Module {
 public:
  TableAndHeadImpl() { register_module("table", table.ptr()); }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto tied = c10::make_intrusive<autograd::TiedGradient>();
    const at::Tensor x = table(tokens, together ? tied : autograd::TiedGradientPtr()).tanh();
    return column_linear(x, autograd::TiedGradient::first(tied, table->weight), {}, one_rank().parallel);
  }

  VocabularyEmbedding table{7, width, one_rank()};
};

/// Units of two layers, one after the other.
class StackImpl : public torch::nn::Module {
 public:
  static constexpr int layers = 5;
  StackImpl() {
    for (int i = 0; i < layers; ++i) units_.push_back(register_module(cat("unit", i), shard::Unit<PlainImpl>()));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& unit : units_) x = unit(x);
    return x;
  }

 private:
  std::vector<shard::Unit<PlainImpl>> units_;
};

at::Tensor loss_of(const at::Tensor& y) {
  return y.square().sum();
}

/// The gradient of the same model by itself, by name.
template <class Impl>
std::map<std::string, at::Tensor> expected_of(const at::Tensor& x, int backwards) {
  Impl model;
  fill_parameters(model, fill);
  for (int i = 0; i < backwards; ++i) loss_of(model.forward(x)).backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& parameter : model.named_parameters()) gradients[parameter.key()] = parameter.value().grad();
  return gradients;
}

void expect_gradients(shard::Sharded& sharded, const std::map<std::string, at::Tensor>& expected) {
  for (const auto& shard : sharded.shards()) {
    ASSERT_TRUE(shard.grad.defined());
    for (const auto& slice : shard.slices) {
      const int64_t count = slice.end - slice.begin;
      const at::Tensor whole = expected.at(slice.name).flatten();
      EXPECT_TRUE(at::allclose(shard.grad.narrow(0, slice.begin, count), whole.narrow(0, slice.offset, count)))
          << slice.name;
    }
  }
}

/// Runs `body(model, sharded)` on two ranks that see the same x, so that the average is the gradient of one.
template <class Impl>
void on_two_ranks(const std::function<void(shard::Unit<Impl>&, shard::Sharded&)>& body,
                  const shard::Options& given = {}) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    shard::Unit<Impl> model;
    fill_parameters(*model, fill);
    shard::Options options = given;
    options.strategy = {{2, 2, 2}, true, true};
    options.limit_reductions = StackImpl::layers;  // nobody waits, so that what is counted does not depend on timing
    auto sharded = shard::shard_model(model, borrowed(fabric), options);
    body(model, sharded);
  });
}

const at::Tensor& input() {
  static const at::Tensor x = numbers({3, width}, 11);
  return x;
}

TEST(GradientPlace, WeightsAreComputedWhereTheyAreReduced) {
  const auto expected = expected_of<PlainImpl>(input(), 1);
  on_two_ranks<PlainImpl>([&](auto& model, shard::Sharded& sharded) {
    for (int step = 1; step <= 3; ++step) {
      sharded.zero_grad();
      loss_of(model(input())).backward();
      expect_gradients(sharded, expected);
      EXPECT_EQ(sharded.statistics().gradients_in_place, 2 * step) << "weights; biases are sums";
    }
  });
}

TEST(GradientPlace, RowsOfATableAreAddedUpWhereTheyAreReduced) {
  const at::Tensor tokens = at::tensor({3, 0, 3, 6, 3, 0});
  const auto expected = expected_of<TableImpl>(tokens, 1);
  on_two_ranks<TableImpl>([&](auto& model, shard::Sharded& sharded) {
    for (int step = 1; step <= 2; ++step) {
      sharded.zero_grad();
      loss_of(model(tokens)).backward();
      expect_gradients(sharded, expected);
      EXPECT_EQ(sharded.statistics().gradients_in_place, step);
    }
  });
}

TEST(GradientPlace, TiedWeightsAreAddedUpElsewhere) {
  const at::Tensor tokens = at::tensor({3, 0, 3, 6, 3, 0});
  const auto expected = expected_of<TiedImpl>(tokens, 1);
  on_two_ranks<TiedImpl>([&](auto& model, shard::Sharded& sharded) {
    loss_of(model(tokens)).backward();
    expect_gradients(sharded, expected);
    EXPECT_EQ(sharded.statistics().gradients_in_place, 0);
  });
}

// The head's gradient is there from the start of backward; the embedding adds its rows at the end, each row once.
TEST(GradientPlace, ATableThatIsTheHeadToo) {
  const at::Tensor tokens = at::tensor({3, 0, 3, 6, 3, 0});
  for (const int backwards : {1, 3}) {
    const auto expected = expected_of<TableAndHeadImpl<false>>(tokens, backwards);
    const auto alone = expected_of<TableAndHeadImpl<true>>(tokens, backwards);
    EXPECT_TRUE(at::equal(expected.at("table.weight"), alone.at("table.weight")));
    on_two_ranks<TableAndHeadImpl<true>>([&](auto& model, shard::Sharded& sharded) {
      for (int step = 1; step <= 2; ++step) {
        sharded.zero_grad();
        {
          const auto waiting = sharded.no_sync();
          for (int i = 1; i < backwards; ++i) loss_of(model(tokens)).backward();
        }
        loss_of(model(tokens)).backward();
        expect_gradients(sharded, expected);
        EXPECT_EQ(sharded.statistics().gradients_in_place, step) << "the first of an accumulation";
      }
    });
  }
}

TEST(GradientPlace, ATableThatIsTheHeadTooForWhoAsksForIts) {
  const at::Tensor tokens = at::tensor({3, 0, 3, 6, 3, 0});
  const auto expected = expected_of<TableAndHeadImpl<false>>(tokens, 1);
  on_two_ranks<TableAndHeadImpl<true>>([&](auto& model, shard::Sharded& sharded) {
    const at::Tensor loss = loss_of(model(tokens));
    for (int i = 0; i < 2; ++i) {
      const auto asked = torch::autograd::grad({loss}, {model->table->weight}, {}, /*retain_graph=*/true);
      EXPECT_TRUE(at::equal(asked[0], expected.at("table.weight")));
    }
    // That the unit was used twice is a reason to compute its gradients elsewhere.
    (void)model(tokens);
    loss_of(model(tokens)).backward();
    expect_gradients(sharded, expected);
    EXPECT_EQ(sharded.statistics().gradients_in_place, 0);
  });
}

TEST(GradientPlace, OneOfAnotherTableIsNotKept) {
  const at::Tensor tokens = at::tensor({3, 0, 6});
  VocabularyEmbedding table{7, width, one_rank()};
  fill_parameters(*table, fill);
  const at::Tensor other = numbers({7, width}, 12).requires_grad_();
  const auto train = [&](const at::Tensor& head) {
    loss_of(column_linear(table(tokens).tanh(), head, {}, one_rank().parallel)).backward();
    return std::pair(std::exchange(table->weight.mutable_grad(), at::Tensor()),
                     std::exchange(at::Tensor(other).mutable_grad(), at::Tensor()));
  };
  const auto [of_table, of_other] = train(other);
  const auto tied = c10::make_intrusive<autograd::TiedGradient>();
  loss_of(
      column_linear(table(tokens, tied).tanh(), autograd::TiedGradient::first(tied, other), {}, one_rank().parallel))
      .backward();
  EXPECT_TRUE(at::equal(table->weight.grad(), of_table));
  EXPECT_TRUE(at::equal(other.grad(), of_other));
  EXPECT_THROW((void)autograd::TiedGradient::first({}, other), InvalidArgument);
}

TEST(GradientPlace, WhatWasAccumulatedIsAddedTo) {
  const auto expected = expected_of<PlainImpl>(input(), 3);
  for (const auto accumulation : {shard::Accumulation::local, shard::Accumulation::two_hop}) {
    on_two_ranks<PlainImpl>(
        [&](auto& model, shard::Sharded& sharded) {
          {
            const auto waiting = sharded.no_sync();
            for (int i = 0; i < 2; ++i) loss_of(model(input())).backward();
          }
          loss_of(model(input())).backward();
          expect_gradients(sharded, expected);
          const int backwards = accumulation == shard::Accumulation::local ? 1 : 3;
          EXPECT_EQ(sharded.statistics().gradients_in_place, 2 * backwards);
        },
        {.accumulation = accumulation});
  }
}

// The outer backward's first gradient waits for its second while the inner one brings another of the same slot.
TEST(GradientPlace, OneThatIsOnItsWayMakesRoomForAnInnerBackward) {
  const auto expected = expected_of<ReusedImpl>(input(), 1);
  on_two_ranks<ReusedImpl>([&](auto& model, shard::Sharded& sharded) {
    for (int step = 0; step < 2; ++step) {
      sharded.zero_grad();
      loss_of(model(input())).backward();
      expect_gradients(sharded, expected);
    }
  });
}

// Places would hold the buffers of all units until the first call's backward.
TEST(GradientPlace, UnitsThatAreUsedTwiceTakeNoBufferEarly) {
  const auto expected = expected_of<StackImpl>(input(), 2);
  on_two_ranks<StackImpl>([&](auto& model, shard::Sharded& sharded) {
    const auto train = [&](int calls) {
      sharded.zero_grad();
      at::Tensor loss = loss_of(model(input()));
      for (int i = 1; i < calls; ++i) loss = loss + loss_of(model(input()));
      loss.backward();
    };
    train(1);
    const auto once = sharded.statistics();
    EXPECT_EQ(once.gradients_in_place, 2 * StackImpl::layers);
    train(2);
    expect_gradients(sharded, expected);
    EXPECT_EQ(sharded.statistics().gradients_in_place, once.gradients_in_place);
    EXPECT_EQ(sharded.statistics().pool_misses, once.pool_misses);
    train(1);
    EXPECT_EQ(sharded.statistics().gradients_in_place, 2 * once.gradients_in_place);
  });
}

// Elsewhere they may be rounded in another way: what a process had begun must not show in the step that follows.
TEST(GradientPlace, ForwardsThatWereCutShortDoNotCount) {
  on_two_ranks<StackImpl>([&](auto& model, shard::Sharded& sharded) {
    const auto train = [&] {
      const int64_t before = sharded.statistics().gradients_in_place;
      loss_of(model(input())).backward();
      EXPECT_EQ(sharded.statistics().gradients_in_place - before, 2 * StackImpl::layers);
    };
    train();
    (void)model(input());
    sharded.rejoin();  // what a rank does that is left when another one was lost
    train();
    (void)model(input());
    EXPECT_ANY_THROW(model(input().narrow(1, 0, 1)));
    train();
  });
}

TEST(GradientPlace, GradientsOfAnotherDtypeAreConverted) {
  on_two_ranks<PlainImpl>(
      [&](auto& model, shard::Sharded& sharded) {
        loss_of(model(input())).backward();
        EXPECT_EQ(sharded.statistics().gradients_in_place, 0);
        for (const auto& shard : sharded.shards()) EXPECT_TRUE(shard.grad.defined());
      },
      {.precision = {.parameters = at::kFloat, .reduce = at::kDouble}});
}

TEST(GradientPlace, WhatSomebodyElseSeesIsATensorOfItsOwn) {
  const auto expected = expected_of<PlainImpl>(input(), 1);
  on_two_ranks<PlainImpl>([&](auto& model, shard::Sharded& sharded) {
    at::Tensor& weight = model->column->weight;
    at::Tensor seen;
    weight.register_hook([&seen](const at::Tensor& gradient) { seen = gradient; });
    loss_of(model(input())).backward();
    const at::Tensor kept = seen;
    EXPECT_EQ(sharded.statistics().gradients_in_place, 1) << "the other weight";
    expect_gradients(sharded, expected);

    const at::Tensor loss = loss_of(model(input()));
    const auto asked = torch::autograd::grad({loss}, {model->row->weight});
    EXPECT_EQ(sharded.statistics().gradients_in_place, 1);
    sharded.zero_grad();
    loss_of(model(at::zeros_like(input()))).backward();  // another step, in the same buffers
    EXPECT_TRUE(at::allclose(asked[0], expected.at("row.weight")));
    EXPECT_TRUE(at::allclose(kept, expected.at("column.weight")));
  });
}

}  // namespace
}  // namespace tesserae::tensor
