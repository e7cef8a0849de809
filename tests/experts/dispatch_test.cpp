#include "tesserae/experts/dispatch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <numeric>
#include <random>

#include "tesserae/base/error.h"
#include "tesserae/base/work.h"
#include "tests/experts/ranks.h"

namespace tesserae::experts {
namespace {

using ::testing::ElementsAre;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::numbers;
using testing::run_mesh;

constexpr int64_t dispatched_width = 5;

/// [tokens, chosen]: distinct experts for each token.
at::Tensor random_choice(int64_t tokens, int64_t chosen, int64_t experts, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> list, all(static_cast<size_t>(experts));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t token = 0; token < tokens; ++token) {
    std::shuffle(all.begin(), all.end(), random);
    list.insert(list.end(), all.begin(), all.begin() + chosen);
  }
  return at::tensor(list, at::kLong).view({tokens, chosen});
}

std::shared_ptr<const Dispatch> planned(const at::Tensor& choice, int64_t experts, comm::MeshFabric& mesh,
                                        double capacity = 0) {
  return plan_dispatch(choice, at::bincount(choice.flatten(), {}, experts), capacity, mesh);
}

/// What an expert does here: multiplies by its number plus one.
at::Tensor multiplied(const at::Tensor& rows, const Dispatch& plan, int64_t first) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (int64_t i = 0; i < plan.counts.size(0); ++i) {
    const int64_t count = plan.counts[i].item<int64_t>();
    parts.push_back(rows.narrow(0, begin, count).mul(static_cast<double>(first + i + 1)));
    begin += count;
  }
  return at::cat(parts);
}

TEST(Dispatch, BringsEveryRowToItsExpertAndBack) {
  constexpr int64_t experts = 8;
  for (const int degree : {1, 2, 4}) {
    for (const int64_t chosen : {1, 2, 3}) {
      run_mesh(4, {.expert = degree}, [&](const std::shared_ptr<tensor::Parallel>& parallel) {
        comm::MeshFabric& mesh = *parallel->mesh();
        const int64_t tokens = 3 * mesh.rank();  // rank 0 has none
        const at::Tensor choice = random_choice(tokens, chosen, experts, static_cast<uint64_t>(10 + mesh.rank()));
        const at::Tensor x = leaf(numbers({tokens, dispatched_width}, 1)), dy = numbers({tokens, dispatched_width}, 2);
        const at::Tensor weights = leaf(numbers({tokens, chosen}, 3));
        const at::Tensor whole_x = leaf(x), whole_weights = leaf(weights);

        const uint64_t before = work_of_this_thread()[static_cast<size_t>(Work::expert_tokens)];
        const auto plan = planned(choice, experts, mesh);
        EXPECT_EQ(work_of_this_thread()[static_cast<size_t>(Work::expert_tokens)] - before,
                  static_cast<uint64_t>(plan->counts.sum().item<int64_t>()));
        const int64_t first = mesh.index(mesh::Axis::expert) * experts / degree;
        const at::Tensor rows = dispatch(x, plan);
        EXPECT_EQ(rows.size(0), plan->counts.sum().item<int64_t>());
        EXPECT_EQ(plan->dropped, 0);
        const at::Tensor y = combine(multiplied(rows, *plan, first), weights, plan);
        y.backward(dy);

        const at::Tensor factors = whole_weights.mul(choice.add(1)).sum(1, true);
        const at::Tensor expected = whole_x.mul(factors);
        expected.backward(dy);
        ASSERT_EQ(y.sizes(), expected.sizes());
        ASSERT_TRUE(x.grad().defined() && weights.grad().defined());
        if (tokens == 0) return;
        expect_close(y, expected, "y");
        expect_close(x.grad(), whole_x.grad(), "gradient of x");
        expect_close(weights.grad(), whole_weights.grad(), "gradient of the weights");
      });
    }
  }
}

TEST(Dispatch, RowsOfAnExpertLieByRankAndToken) {
  run_mesh(2, {.expert = 2}, [](const std::shared_ptr<tensor::Parallel>& parallel) {
    comm::MeshFabric& mesh = *parallel->mesh();
    // Token i of rank r is the number 10 r + i.
    const at::Tensor x = at::arange(3, at::kDouble).add_(10.0 * mesh.rank()).unsqueeze(1);
    const at::Tensor choice = at::tensor(std::vector<int64_t>{3, 0, 3}, at::kLong).unsqueeze(1);
    const auto plan = planned(choice, 4, mesh);
    const at::Tensor rows = dispatch(x, plan).flatten();
    const std::vector<double> got(rows.const_data_ptr<double>(), rows.const_data_ptr<double>() + rows.numel());
    if (mesh.rank() == 0) {
      EXPECT_THAT(got, ElementsAre(1, 11));
    } else {
      EXPECT_THAT(got, ElementsAre(0, 2, 10, 12));
    }
    EXPECT_EQ(plan->moved(), 3);
  });
}

TEST(Dispatch, BeyondTheCapacityTheLastAreDropped) {
  // Five choices of expert 0, two of 1, none of 2 and 3, in the order of ranks; capacity ceil(factor * 7 / 4).
  const std::vector<std::vector<int64_t>> choices{{0, 0, 1}, {0, 0, 0, 1}};
  for (const auto& [factor, kept] : {std::pair<double, int64_t>{1.0, 2}, {1.5, 3}, {4.0, 5}}) {
    run_mesh(2, {.expert = 2}, [&](const std::shared_ptr<tensor::Parallel>& parallel) {
      comm::MeshFabric& mesh = *parallel->mesh();
      const auto& own = choices[static_cast<size_t>(mesh.rank())];
      const at::Tensor choice = at::tensor(own, at::kLong).unsqueeze(1);
      const at::Tensor x = leaf(numbers({choice.size(0), dispatched_width}, 1));
      const at::Tensor weights = at::ones({choice.size(0), 1}, at::kDouble);
      const auto plan = planned(choice, 4, mesh, factor);
      const at::Tensor y = combine(dispatch(x, plan), weights, plan);
      y.sum().backward();
      int64_t seen = mesh.rank() == 0 ? 0 : 2, dropped = 0;
      for (int64_t token = 0; token < choice.size(0); ++token) {
        const bool first_expert = own[static_cast<size_t>(token)] == 0;
        const bool takes = !first_expert || seen++ < kept;
        dropped += takes ? 0 : 1;
        EXPECT_TRUE(y[token].equal(x[token].mul(takes ? 1 : 0))) << token;
        EXPECT_EQ(x.grad()[token].sum().item<double>(), takes ? dispatched_width : 0) << token;
      }
      EXPECT_EQ(plan->dropped, dropped);
    });
  }
}

TEST(Dispatch, ADegreeThatCanNotBeNamesThoseThatWouldDo) {
  EXPECT_EQ(experts_of_rank(6, 3), 2);
  try {
    experts_of_rank(6, 4);
    ADD_FAILURE() << "6 experts on 4 ranks";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("6 experts cannot be shared out by an expert-parallel degree of 4"));
    EXPECT_THAT(error.what(), HasSubstr("would do: 1, 2, 3, 6"));
  }
}

}  // namespace
}  // namespace tesserae::experts
