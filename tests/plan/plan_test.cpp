#include "tesserae/plan/plan.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tesserae/base/error.h"
#include "tesserae/plan/table.h"

namespace tesserae::plan {
namespace {

using ::testing::HasSubstr;

cost::Transformer tiny_model() {  // 1,480 parameters: model_test.cpp
  return cost::Transformer(
      {.vocabulary = 10, .dimension = 8, .layers = 2, .heads = 2, .feed_forward = 16, .tied = false});
}

Training step_of(int64_t batch) {
  return {.batch = batch, .run = {.sequence = 6, .compute_bytes = 2}, .reduce_bytes = 2};
}

/// Round numbers, no latency; nothing takes time but products, hops and the optimizer.
cost::Machine small_machine() {
  cost::Machine machine;
  machine.name = "small";
  machine.memory = 20000;
  machine.knows_network = true;
  machine.compute["bf16"].products = machine.compute["bf16"].attention = cost::Curve(1000);
  machine.links = {.inside = 100, .between = 10, .inside_latency = 0, .between_latency = 0, .memory = 1000};
  return machine;
}

/// Four devices on two hosts.
Cluster small_cluster() {
  return {.devices = 4, .per_host = 2, .headroom = 0.1, .machine = small_machine()};
}

const Entry& find(const std::vector<Entry>& entries, int tensor, const mesh::Degrees& degrees) {
  const auto found = std::ranges::find_if(
      entries, [&](const Entry& entry) { return entry.tensor == tensor && entry.degrees == degrees; });
  if (found == entries.end()) throw InvalidArgument("find", "no such layout");
  return *found;
}

TEST(Plan, HasEveryLayoutOnceAndTheBestFirst) {
  const auto entries = make_plan(tiny_model(), step_of(4), small_cluster());
  EXPECT_EQ(entries.size(), mesh::all_degrees(4).size() + mesh::all_degrees(2).size());
  for (size_t i = 1; i < entries.size(); ++i) {
    EXPECT_LE(std::tuple(!entries[i - 1].fits, entries[i - 1].seconds()),
              std::tuple(!entries[i].fits, entries[i].seconds()));
  }
  for (const Entry& entry : entries) {
    EXPECT_EQ(entry.tensor * entry.ranks, 4);
    EXPECT_EQ(entry.fits, entry.memory() <= 18000);
  }
  EXPECT_TRUE(entries.front().fits);
  EXPECT_FALSE(entries.back().fits);
}

TEST(Plan, MemoryByHand) {
  const auto entries = make_plan(tiny_model(), step_of(4), small_cluster());
  const Entry& entry = find(entries, 1, {2, 2, 4});
  EXPECT_EQ(entry.micro_batches, 1);
  EXPECT_EQ(entry.state.pieces, 2 * 1480 / 2);
  EXPECT_EQ(entry.state.masters, 4 * 1480 / 4);
  EXPECT_EQ(entry.state.state, 8 * 1480 / 4);
  EXPECT_EQ(entry.state.gradients, 4 * 1480 / 4);
  EXPECT_EQ(entry.state.gathered, 2 * (88 + 2 * 656));
  EXPECT_EQ(entry.state.reductions, 2 * (88 + 2 * 656));
  EXPECT_EQ(entry.activations.total(), 6 * 2 * 264 + 6 * 96);
  EXPECT_EQ(entry.memory(), 1480 + 1480 + 2960 + 1480 + 2800 + 2800 + 3744);
  // T = 2 has 760 parameters a rank, and two micro-batches: gradients add up in pieces.
  const Entry& split = find(entries, 2, {2, 2, 2});
  EXPECT_EQ(split.micro_batches, 2);
  EXPECT_EQ(split.state.masters, 4 * 760 / 2);
  EXPECT_EQ(split.state.gradients, 4 * 760 / 2 + 2 * 760 / 2);
  EXPECT_EQ(split.state.pieces, 0);
}

TEST(Plan, TrafficAndTimeByHand) {
  const auto entries = make_plan(tiny_model(), step_of(4), small_cluster());
  const Entry& entry = find(entries, 1, {2, 2, 4});
  EXPECT_EQ(entry.data.gather.bytes, 2 * 2 * 1480 / 2);
  EXPECT_EQ(entry.data.first_hop.bytes, 2 * 1480 / 2);
  EXPECT_EQ(entry.data.second_hop.bytes, 2 * 1480 / 2 / 2);
  EXPECT_EQ(entry.data.refresh.bytes, 2 * 1480 / 2 / 2);
  EXPECT_EQ(entry.inside(), 2960 + 1480);
  EXPECT_EQ(entry.between(), 740 + 740);
  EXPECT_DOUBLE_EQ(entry.compute, 24.0 * 3 * (2 * (1280 + 96) + 160) / 1000 / 4);
  EXPECT_EQ(entry.tensor_seconds, 0);
  EXPECT_DOUBLE_EQ(entry.data_seconds, 4440 / 100.0 + 1480 / 10.0);
  EXPECT_DOUBLE_EQ(entry.optimizer_seconds, (4 * 4 + 2 * 8) * 1480 / 4 / 1000.0);

  const Entry& split = find(entries, 2, {1, 1, 2});  // T inside the hosts, N between them
  EXPECT_FALSE(split.tensor_hop.crosses);
  EXPECT_EQ(split.tensor_hop.bytes, 2 * (48 * 25 + 72));
  EXPECT_EQ(split.inside(), 2544);
  EXPECT_EQ(split.between(), 2 * 760 / 2 + 2 * 760 / 2) << "second hop and refresh";
  EXPECT_DOUBLE_EQ(split.tensor_seconds, 25.44);
  const double shown = split.compute + split.tensor_seconds, rest = 1 - (8 + 40) / 760.0;
  EXPECT_DOUBLE_EQ(split.exposed_seconds, split.data_seconds - std::min(rest * split.data_seconds / 2, shown * 2 / 3) -
                                              std::min(rest * split.data_seconds / 2, shown / 3 / 2))
      << "half of it reduces, half refreshes behind the first of two micro-batches, and of the root nothing is hidden";
  EXPECT_DOUBLE_EQ(split.seconds(), shown + split.exposed_seconds + split.optimizer_seconds + split.engine_seconds);

  // A meeting of all ranks is one inside a host only where there is no other.
  Cluster meets = small_cluster();
  meets.machine.meeting = 2;
  EXPECT_DOUBLE_EQ(find(make_plan(tiny_model(), step_of(4), meets), 2, {1, 1, 2}).tensor_seconds, 25.44);
  meets.per_host = 4;
  const Entry inside = find(make_plan(tiny_model(), step_of(4), meets), 2, {1, 1, 2});
  EXPECT_DOUBLE_EQ(inside.tensor_seconds, 25.44 + 2 * inside.tensor_hop.calls);

  // What only whole steps tell.
  Cluster measured = small_cluster();
  cost::Machine::Compute& rates = measured.machine.compute.at(step_of(4).dtype);
  rates.share_split = 0.5;
  rates.for_units = 3;
  rates.for_parameters = 7;
  const Entry longer = find(make_plan(tiny_model(), step_of(4), measured), 2, {1, 1, 2});
  EXPECT_EQ(longer.micro_batches, 2) << "of four units";
  EXPECT_DOUBLE_EQ(longer.tensor_seconds, split.tensor_seconds + 0.5 * split.compute);
  EXPECT_DOUBLE_EQ(longer.engine_seconds, split.engine_seconds + 3 * 4 * 2 + 7 * step_of(4).run.compute_bytes * 760.0);

  Cluster lonely = small_cluster();
  lonely.per_host = 1;
  EXPECT_TRUE(find(make_plan(tiny_model(), step_of(4), lonely), 2, {1, 1, 1}).tensor_hop.crosses);
  lonely.per_host = 8;
  EXPECT_FALSE(find(make_plan(tiny_model(), step_of(4), lonely), 2, {1, 1, 1}).tensor_hop.crosses);
}

TEST(Plan, ContextRanksShareOutTheBatchToo) {
  Training training = step_of(4);
  training.run.context = 0;
  const auto entries = make_plan(tiny_model(), training, small_cluster());
  EXPECT_EQ(entries.size(), 3 * mesh::all_degrees(4).size() + 2 * mesh::all_degrees(2).size());
  const auto of = [&](int tensor, int context) -> const Entry& {
    const auto found = std::ranges::find_if(entries, [&](const Entry& entry) {
      return entry.tensor == tensor && entry.context == context && entry.degrees == mesh::Degrees{2, 2, 2};
    });
    EXPECT_NE(found, entries.end());
    return *found;
  };
  const Entry &whole = of(1, 1), &cut = of(1, 4);
  EXPECT_EQ(whole.micro_batches, 1);
  EXPECT_EQ(cut.micro_batches, 4) << "each of the four sequences is all ranks'";
  EXPECT_GT(cut.activations.blocks, whole.activations.blocks / 4) << "attention keeps its result twice";
  EXPECT_LT(cut.activations.blocks, whole.activations.blocks / 3);
  EXPECT_EQ(cut.state.total(), of(1, 2).state.total()) << "state does not depend on C, but on accumulation";
  EXPECT_EQ(cut.compute, whole.compute);
  EXPECT_FALSE(of(1, 2).context_hop.crosses);
  EXPECT_TRUE(cut.context_hop.crosses) << "four ranks on two hosts";
  EXPECT_TRUE(of(2, 2).context_hop.crosses);
  EXPECT_DOUBLE_EQ(cut.context_seconds, cut.context_hop.bytes / 10);
  EXPECT_DOUBLE_EQ(cut.seconds(), cut.compute + cut.context_seconds + cut.exposed_seconds + cut.optimizer_seconds +
                                      cut.engine_seconds);
  // What adds up whole is reduced behind the last backward alone, and is added up by the way.
  training.two_hop = false;
  const auto others = make_plan(tiny_model(), training, small_cluster());
  const auto late = std::ranges::find_if(others, [&](const Entry& entry) {
    return entry.tensor == 1 && entry.context == 4 && entry.degrees == mesh::Degrees{1, 1, 1};
  });
  const auto early = std::ranges::find_if(entries, [&](const Entry& entry) {
    return entry.tensor == 1 && entry.context == 4 && entry.degrees == mesh::Degrees{1, 1, 1};
  });
  EXPECT_DOUBLE_EQ(late->data_seconds, early->data_seconds);
  EXPECT_GT(late->exposed_seconds, early->exposed_seconds);
}

TEST(Plan, ChoosesTheMicroBatchOfEachLayout) {
  Training training = step_of(16);
  training.run.micro_batch = 0;
  Cluster cluster = small_cluster();
  cluster.machine.memory = 30000;
  const auto chosen = make_plan(tiny_model(), training, cluster);
  ASSERT_EQ(chosen.size(), 14u);
  bool larger_than_1 = false;
  for (const Entry& entry : chosen) {
    EXPECT_EQ(entry.micro_batch * entry.micro_batches * entry.ranks, 16);
    larger_than_1 = larger_than_1 || entry.micro_batch > 1;
    for (training.run.micro_batch = 1; training.run.micro_batch <= 16 / entry.ranks; training.run.micro_batch *= 2) {
      const auto all = make_plan(tiny_model(), training, cluster);
      const Entry& other = find(all, entry.tensor, entry.degrees);
      EXPECT_TRUE(entry.fits || !other.fits);
      if (other.fits) {
        EXPECT_LE(entry.seconds(), other.seconds());
      }
    }
  }
  EXPECT_TRUE(larger_than_1);
}

// 384 parameters an expert, of four in each of two blocks; 1,480 - 2 x 384 + 2 x 32 else.
TEST(Plan, ExpertsAreShardedOverTheirRanks) {
  const cost::Transformer mixture(
      {.vocabulary = 10, .dimension = 8, .layers = 2, .heads = 2, .feed_forward = 16, .tied = false, .experts = 4});
  Training training = step_of(4);
  training.run.expert = 0;
  const auto entries = make_plan(mixture, training, small_cluster());
  EXPECT_EQ(entries.size(), 3 * mesh::all_degrees(4).size() + 2 * mesh::all_degrees(2).size()) << "E = 1, 2, 4";
  const auto of = [&](int expert, const mesh::Degrees& degrees) -> const Entry& {
    const auto found = std::ranges::find_if(entries, [&](const Entry& entry) {
      return entry.tensor == 1 && entry.expert == expert && entry.degrees == degrees;
    });
    EXPECT_NE(found, entries.end());
    return *found;
  };
  constexpr int64_t rest = 1480 - 2 * 384 + 2 * 32, experts = 2 * 4 * 384;
  const Entry& whole = of(1, {4, 4, 4});
  EXPECT_EQ(whole.state.masters, 4 * (rest + experts) / 4);
  EXPECT_EQ(whole.state.gathered, 2 * (88 + 2 * 4 * 384)) << "of the experts of two blocks";
  EXPECT_EQ(whole.state.reductions, 2 * (88 + 3 * 4 * 384)) << "of a block, while those of its experts come";
  EXPECT_EQ(whole.expert_hop.bytes, 0);
  EXPECT_EQ(whole.data.gather.bytes, 2 * 2 * (rest + experts) * 3 / 4);

  // Of two indices, each with two experts of a block on ranks 0 and 2, or 1 and 3, which are of two hosts.
  const Entry& half = of(2, {4, 4, 4});
  EXPECT_EQ(half.state.masters, 4 * (rest / 4 + experts / 2 / 2));
  EXPECT_EQ(half.state.state, 8 * (rest / 4 + experts / 2 / 2));
  EXPECT_EQ(half.data.gather.bytes, 2 * 2 * (rest * 3 / 4 + experts / 2 / 2));
  EXPECT_FALSE(half.expert_hop.crosses);
  EXPECT_EQ(half.expert_hop.bytes, 2 * (4 * 6 * 8 * 2 + 2 * 8));
  EXPECT_DOUBLE_EQ(half.expert_seconds, half.expert_hop.bytes / 100);
  EXPECT_EQ(half.inside(), half.expert_hop.bytes) << "all else is between hosts";

  // One expert of a block on each: nothing of it is gathered or reduced, whatever the degrees.
  const Entry& alone = of(4, {2, 2, 4});
  EXPECT_EQ(alone.state.masters, 4 * (rest / 4 + experts / 4));
  EXPECT_EQ(alone.state.pieces, 2 * (rest / 2 + 0)) << "its master is in fp32: that of an expert is copied to a buffer";
  EXPECT_EQ(alone.data.gather.bytes, 2 * 2 * rest / 2);
  EXPECT_EQ(alone.data.third_hop.bytes, 0);
  EXPECT_TRUE(alone.expert_hop.crosses) << "four ranks on two hosts";

  training.run.expert = 3;
  EXPECT_THROW(make_plan(mixture, training, small_cluster()), InvalidArgument);
  training.run.expert = 2;
  EXPECT_THROW(make_plan(tiny_model(), training, small_cluster()), InvalidArgument) << "it has no experts";
  training.run.expert = 0;
  const std::string text = as_text(mixture, training, small_cluster(), entries, 3);
  EXPECT_EQ(std::ranges::count(text, '\n'), 4 + 1 + 2 + 3);
  EXPECT_THAT(text, HasSubstr("    T     C     E     P "));
}

TEST(Plan, RefusesWhatCanNotBe) {
  auto refusal = [](const Training& training, const Cluster& cluster) -> std::string {
    try {
      make_plan(tiny_model(), training, cluster);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(step_of(4), small_cluster()), "");
  EXPECT_EQ(refusal(step_of(2), small_cluster()), "") << "with T = 2";
  EXPECT_THAT(refusal(step_of(7), small_cluster()), HasSubstr("the nearest that can at degree 1 is 8"));
  Training training = step_of(4);
  for (const int64_t size : {int64_t{5}, std::numeric_limits<int64_t>::max()}) {
    training.run.micro_batch = size;
    EXPECT_THAT(refusal(training, small_cluster()), HasSubstr("is more than the whole batch of 4"));
  }
  Cluster cluster = small_cluster();
  cluster.devices = 5;
  EXPECT_THAT(refusal(step_of(5), cluster), HasSubstr("do not fill hosts of 2"));
  cluster.devices = 1'000'000;
  EXPECT_THAT(refusal(step_of(5), cluster), HasSubstr("1000000 devices: a plan is of at most 262144"));
  cluster = small_cluster();
  cluster.machine.knows_network = false;
  EXPECT_THAT(refusal(step_of(4), cluster), HasSubstr("\"small\" was measured on one"));
  cluster.per_host = 4;
  EXPECT_EQ(refusal(step_of(4), cluster), "");
  cluster = small_cluster();
  cluster.machine.memory = 0;
  EXPECT_NE(refusal(step_of(4), cluster), "");
}

TEST(Plan, AModelOfAboutSoManyParameters) {
  for (const double parameters : {15e9, 70e9, 500e9}) {
    const model::GptConfig shape = model_of(
        parameters, {.vocabulary = 128000, .dimension = 8192, .layers = 64, .heads = 0, .kv_heads = 8, .tied = false});
    EXPECT_EQ(shape.heads, 64);
    EXPECT_EQ(shape.feed_forward % 256, 0);
    EXPECT_NEAR(static_cast<double>(model::sizes(shape).total), parameters, 0.02 * parameters);
  }
  EXPECT_THROW(model_of(1e6, {.dimension = 8192, .layers = 64}), InvalidArgument);
}

TEST(Plan, IsPrinted) {
  const auto entries = make_plan(tiny_model(), step_of(4), small_cluster());
  const std::string text = as_text(tiny_model(), step_of(4), small_cluster(), entries, 3);
  EXPECT_EQ(std::ranges::count(text, '\n'), 4 + 1 + 2 + 3);
  const auto json = as_json(tiny_model(), step_of(4), small_cluster(), entries, 100);
  ASSERT_EQ(json["layouts"].size(), entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& layout = json["layouts"][i];
    double sum = 0;
    for (const auto& [name, bytes] : layout["memory"].items()) sum += name == "total" ? 0.0 : bytes.get<double>();
    EXPECT_DOUBLE_EQ(layout["memory"]["total"], sum);
    EXPECT_EQ(layout["memory"]["total"], entries[i].memory());
  }
}

}  // namespace
}  // namespace tesserae::plan
