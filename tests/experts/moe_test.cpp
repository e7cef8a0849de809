#include "tesserae/experts/moe.h"

#include <ATen/ops/full.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <numeric>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"
#include "tesserae/experts/step_loads.h"
#include "tests/experts/ranks.h"

// A layer on every mesh against the formula on all tokens, in one process, without rows, groups or ranks.
namespace tesserae::experts {
namespace {

using testing::expect_close;
using testing::leaf;
using testing::numbers;
using testing::run_mesh;

constexpr int64_t moe_width = 6, moe_experts = 8, moe_hidden = 4;

struct MoeCase {
  const char* name = "";
  MoeOptions options;
  std::vector<int64_t> tokens{3, 3, 3, 3};  // of each quarter of the batch: a state rank has one or several
  int64_t to_one = -1;                      // all tokens prefer this expert, and then the next ones
  bool sequence = false;
};

MoeOptions moe_options(RoutingOptions routing, double capacity = 0, int64_t shared = 0) {
  routing.width = moe_width;
  routing.experts = moe_experts;
  return {.routing = routing, .hidden = moe_hidden, .shared_hidden = shared, .capacity_factor = capacity};
}

std::string name_of(const MoeCase& c, const tensor::Parallel& parallel) {
  return cat(c.name, ", ", to_string(parallel.mesh()->mesh()), c.sequence ? ", sequence" : "");
}

at::Tensor parameter_of(const MoeCase& c, const std::string& name, at::IntArrayRef shape) {
  if (name != "router.weight" || c.to_one < 0) return testing::whole_of(name, shape);
  // Tokens are positive, so an expert's logit is its row's.
  at::Tensor weight = at::zeros(shape, at::kDouble);
  for (int64_t i = 0; i < moe_experts; ++i)
    weight[(c.to_one + i) % moe_experts].fill_(1.0 - 0.1 * static_cast<double>(i));
  return weight;
}

at::Tensor tokens_of(const MoeCase& c) {
  const int64_t sum = std::accumulate(c.tokens.begin(), c.tokens.end(), int64_t{0});
  return c.to_one < 0 ? numbers({sum, moe_width}, 1) : numbers({sum, moe_width}, 1).abs();
}

/// The formula.
struct WholeMoe {
  explicit WholeMoe(const MoeCase& c) : options(c.options) {
    const auto add = [&](const std::string& name, at::IntArrayRef shape) {
      parameters[name] = leaf(parameter_of(c, name, shape));
    };
    add("router.weight", {moe_experts, moe_width});
    add("experts.gate", {moe_experts, moe_hidden, moe_width});
    add("experts.up", {moe_experts, moe_hidden, moe_width});
    add("experts.down", {moe_experts, moe_width, moe_hidden});
    if (options.shared_hidden == 0) return;
    add("shared.gate.weight", {options.shared_hidden, moe_width});
    add("shared.up.weight", {options.shared_hidden, moe_width});
    add("shared.down.weight", {moe_width, options.shared_hidden});
  }

  static at::Tensor swiglu(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down) {
    return at::silu(x.matmul(gate.t())).mul(x.matmul(up.t())).matmul(down.t());
  }

  // [tokens, experts]: 1 where a token goes to an expert.
  at::Tensor mask(const at::Tensor& scores) {
    const at::Tensor chosen =
        at::zeros_like(scores).scatter(1, std::get<1>(at::topk(scores.detach(), options.routing.chosen)), 1.0);
    if (options.capacity_factor == 0) return chosen;
    const double total = chosen.sum().item<double>();
    const double capacity = std::ceil(options.capacity_factor * total / moe_experts);
    const at::Tensor kept = chosen.mul(chosen.cumsum(0).le(capacity));
    dropped = static_cast<int64_t>(total - kept.sum().item<double>());
    return kept;
  }

  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const RoutingOptions& routing = options.routing;
    const at::Tensor logits = x.matmul(parameters["router.weight"].t());
    const at::Tensor scores = routing.scores == Scores::softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
    const at::Tensor chosen =
        at::zeros_like(scores).scatter(1, std::get<1>(at::topk(scores.detach(), routing.chosen)), 1.0);
    at::Tensor weights = scores.mul(chosen);
    if (routing.normalised) weights = weights.div(weights.sum(1, true));
    weights = weights.mul(routing.scale).mul(mask(scores));
    at::Tensor y = at::zeros_like(x);
    for (int64_t i = 0; i < moe_experts; ++i) {
      const at::Tensor made =
          swiglu(x, parameters["experts.gate"][i], parameters["experts.up"][i], parameters["experts.down"][i]);
      y = y.add(made.mul(weights.narrow(1, i, 1)));
    }
    if (options.shared_hidden > 0) {
      y = y.add(swiglu(x, parameters["shared.gate.weight"], parameters["shared.up.weight"],
                       parameters["shared.down.weight"]));
    }
    at::Tensor loss = at::zeros({}, at::kDouble);
    if (routing.balance_loss > 0) {
      const at::Tensor shares = scores.div(scores.sum(1, true)).mean(0);
      const double chosen_each = static_cast<double>(routing.chosen);
      loss = loss.add(chosen.mean(0).div(chosen_each).mul(shares).sum(), routing.balance_loss * moe_experts);
    }
    if (routing.z_loss > 0) loss = loss.add(logits.logsumexp(1).square().mean(), routing.z_loss);
    return {y, loss};
  }

  MoeOptions options;
  std::map<std::string, at::Tensor> parameters;
  int64_t dropped = 0;
};

/// The tokens of this rank: a run of quarters for each state rank.
mesh::Range tokens_of_rank(const MoeCase& c, const comm::MeshFabric& mesh) {
  const auto quarters = static_cast<int>(c.tokens.size()) / mesh.degree(mesh::axes::state);
  const auto first = c.tokens.begin() + static_cast<std::ptrdiff_t>(mesh.index(mesh::axes::state)) * quarters;
  const int64_t begin = std::accumulate(c.tokens.begin(), first, int64_t{0});
  return {begin, std::accumulate(first, first + quarters, begin)};
}

void compare_layer(const tensor::ParallelPtr& parallel, const MoeCase& c) {
  SCOPED_TRACE(name_of(c, *parallel));
  comm::MeshFabric& mesh = *parallel->mesh();
  const at::Tensor x = leaf(tokens_of(c)), dy = numbers(x.sizes(), 2);
  WholeMoe whole(c);
  const auto [expected, expected_loss] = whole.forward(x);
  expected.mul(dy).sum().add(expected_loss).backward();

  const int64_t sequence = c.sequence ? 0 : tensor::no_sequence;
  Moe moe(c.options, tensor::LayerOptions{parallel, sequence, at::TensorOptions().dtype(at::kDouble)});
  tensor::fill_parameters(*moe, [&](const std::string& name, at::Tensor& parameter) {
    parameter.copy_(parameter_of(c, name, parameter.sizes()));
  });
  const mesh::Range range = tokens_of_rank(c, mesh);
  const auto own = [&](const at::Tensor& t) {
    const at::Tensor mine = t.narrow(0, range.begin, range.size());
    return c.sequence ? testing::piece(mine, 0, *parallel) : mine;
  };
  const at::Tensor input = leaf(own(x));
  const auto [y, loss] = moe->forward(input);
  // The losses of the N ranks are means to be: each is N times its part.
  y.mul(own(dy)).sum().add(loss, 1.0 / mesh.degree(mesh::axes::state)).backward();

  at::Tensor sum = loss.detach().clone().unsqueeze(0);
  mesh.group(mesh::axes::state, comm::Traffic::control).all_reduce(sum);
  EXPECT_NEAR(sum.item<double>() / mesh.degree(mesh::axes::state), expected_loss.item<double>(), 1e-12);
  const Load load = over_ranks(moe->load(), mesh);
  EXPECT_EQ(load.dropped, whole.dropped);
  EXPECT_EQ(std::accumulate(load.tokens.begin(), load.tokens.end(), int64_t{0}), x.size(0) * c.options.routing.chosen);
  if (c.to_one >= 0) {
    EXPECT_EQ(load.tokens[static_cast<size_t>(c.to_one)], x.size(0));
  }

  ASSERT_EQ(y.sizes(), input.sizes());
  ASSERT_TRUE(input.grad().defined());
  if (input.size(0) > 0) {
    expect_close(y, own(expected), "y");
    expect_close(input.grad(), own(x.grad()), "gradient of x");
  }
  std::map<std::string, mesh::Splits> splits;
  const auto& unit = dynamic_cast<const tensor::SplitParameters&>(*moe->named_modules()["experts"]);
  for (const auto& split : unit.split_parameters()) {
    splits["experts." + split.name] = split.split;
  }
  for (const auto& item : moe->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    at::Tensor gradient = item.value().grad().contiguous().clone();
    at::Tensor formula = whole.parameters[item.key()].grad();
    const auto split = splits.find(item.key());
    mesh.group(split == splits.end() ? mesh::axes::state : mesh::axes::expert_state, comm::Traffic::control)
        .all_reduce(gradient);
    if (split != splits.end()) {
      formula = tensor::part_of(formula, split->second);
    } else if (item.key().starts_with("shared.")) {
      formula = testing::piece(formula, item.key() == "shared.down.weight" ? 1 : 0, *parallel);
    }
    expect_close(gradient, formula, item.key().c_str());
  }
}

const std::vector<mesh::AxisDegrees> meshes{{.expert = 1},
                                            {.expert = 2},
                                            {.expert = 4},
                                            {.tensor = 2, .expert = 2},
                                            {.tensor = 2},
                                            {.tensor = 4},
                                            {.context = 2, .expert = 4}};

void compare_everywhere(const MoeCase& c) {
  for (const auto& axes : meshes) {
    run_mesh(4, axes, [&](const tensor::ParallelPtr& parallel) { compare_layer(parallel, c); });
  }
  run_mesh(1, {}, [&](const tensor::ParallelPtr& parallel) { compare_layer(parallel, c); });
}

TEST(Moe, EqualsTheFormulaOnOneProcess) {
  compare_everywhere({.name = "Mixtral", .options = moe_options({.chosen = 2})});
  compare_everywhere(
      {.name = "Switch", .options = moe_options({.chosen = 1, .normalised = false, .balance_loss = 0.1})});
  compare_everywhere(
      {.name = "DeepSeek",
       .options = moe_options(
           {.chosen = 3, .scores = Scores::sigmoid, .scale = 2.5, .balance_loss = 0.1, .z_loss = 0.01}, 0, 8)});
}

TEST(Moe, EqualsItWithASplitSequence) {
  for (const auto& axes : {mesh::AxisDegrees{.tensor = 2, .expert = 2}, {.tensor = 2}, {.tensor = 4}}) {
    run_mesh(4, axes, [&](const tensor::ParallelPtr& parallel) {
      compare_layer(parallel, {.name = "sequence",
                               .options = moe_options({.chosen = 2, .balance_loss = 0.1, .z_loss = 0.01}, 0, 8),
                               .tokens = {4, 4, 4, 4},
                               .sequence = true});
    });
  }
}

TEST(Moe, AllTokensToOneExpertLeaveTheOthersWithZeroGradients) {
  for (const int64_t expert : {0, 5, 7}) {
    compare_everywhere(
        {.name = "to one", .options = moe_options({.chosen = 1, .normalised = false}), .to_one = expert});
    compare_everywhere({.name = "to two", .options = moe_options({.chosen = 2, .z_loss = 0.1}), .to_one = expert});
  }
}

TEST(Moe, RanksWithoutTokensTakePart) {
  const MoeOptions options = moe_options({.chosen = 2, .balance_loss = 0.1, .z_loss = 0.01}, 0, 8);
  compare_everywhere({.name = "one token", .options = options, .tokens = {0, 0, 1, 0}});
  compare_everywhere({.name = "uneven", .options = options, .tokens = {5, 0, 1, 2}});
}

TEST(Moe, BeyondTheCapacityTokensGetLess) {
  compare_everywhere({.name = "capacity", .options = moe_options({.chosen = 2}, 1.0)});
  compare_everywhere({.name = "tight", .options = moe_options({.chosen = 2, .balance_loss = 0.1}, 0.25, 8)});
  compare_everywhere({.name = "all to one", .options = moe_options({.chosen = 1}, 1.0), .to_one = 3});
}

TEST(Moe, NobodyHasTokens) {
  run_mesh(2, {.expert = 2}, [](const tensor::ParallelPtr& parallel) {
    const MoeOptions options = moe_options({.chosen = 2, .balance_loss = 0.1, .z_loss = 0.01}, 1.0, 8);
    Moe moe(options, tensor::LayerOptions{parallel, tensor::no_sequence, at::TensorOptions().dtype(at::kDouble)});
    tensor::fill_parameters(*moe, testing::fill);
    const at::Tensor x = leaf(numbers({0, moe_width}, 1));
    const auto [y, loss] = moe->forward(x);
    y.sum().add(loss).backward();
    EXPECT_EQ(loss.item<double>(), 0);
    for (const auto& item : moe->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_EQ(item.value().grad().abs().sum().item<double>(), 0) << item.key();
    }
  });
}

TEST(Moe, BiasesMoveAtStepsThatUpdateTheModel) {
  run_mesh(2, {.expert = 2}, [](const tensor::ParallelPtr& parallel) {
    auto root = std::make_shared<torch::nn::Module>("Root");
    const MoeOptions options = moe_options({.chosen = 1, .bias_rate = 0.1});
    Moe moe = root->register_module("moe", Moe(options, tensor::LayerOptions{parallel}));
    tensor::fill_parameters(*moe, testing::fill);
    StepLoads loads(*root);
    const auto step = [&](bool updated) {
      loads.begin_step();
      moe->forward(numbers({3, moe_width}, 1).to(at::kFloat));
      EXPECT_EQ(loads.from_sums(comm::sums_over_ranks(*parallel->mesh()->job(), loads.to_sum()), updated).size(), 1);
      return moe->router().bias.abs().sum().item<double>();
    };
    EXPECT_EQ(step(false), 0);
    EXPECT_GT(step(true), 0);
  });
}

TEST(Moe, SaysWhatMoved) {
  run_mesh(2, {.expert = 2}, [](const tensor::ParallelPtr& parallel) {
    comm::MeshFabric& mesh = *parallel->mesh();
    MoeCase c{.options = moe_options({.chosen = 1}), .to_one = 0};
    Moe moe(c.options, tensor::LayerOptions{parallel});
    tensor::fill_parameters(*moe, [&](const std::string& name, at::Tensor& parameter) {
      parameter.copy_(parameter_of(c, name, parameter.sizes()));
    });
    const uint64_t before = mesh.group(mesh::Axis::expert, comm::Traffic::control).counters().exchange.bytes;
    moe->forward(numbers({3, moe_width}, 1).abs().to(at::kFloat));
    const uint64_t sent = mesh.group(mesh::Axis::expert, comm::Traffic::control).counters().exchange.bytes - before;
    EXPECT_EQ(moe->load().bytes, 3u * moe_width * sizeof(float)) << "there, or back";
    EXPECT_EQ(sent, moe->load().bytes + sizeof(int64_t) * moe_experts / 2) << "and the counts";
    EXPECT_DOUBLE_EQ(moe->load().imbalance(), moe_experts);
  });
}

}  // namespace
}  // namespace tesserae::experts
