#include "tesserae/config/config.h"

#include <gtest/gtest.h>

#include "tests/config/documents.h"

namespace tesserae::config {
namespace {

Config with(const std::string& keys) {
  return config_of(R"({"data": {"path": "x"}, )" + keys + "}");
}
Config plain() {
  return config_of(R"({"data": {"path": "x"}})");
}

TEST(Config, DerivesWhatOtherKeysDetermine) {
  const Config config = with(R"("random_seed": 7, "model": {"dimension": 192, "heads": 6})");
  EXPECT_EQ(config.run.folder, "runs/job");
  EXPECT_EQ(config.run.seed, 7u);
  EXPECT_EQ(config.model.kv_heads, 6);
  EXPECT_EQ(config.model.feed_forward, 512);
  EXPECT_EQ(config.resolved["model"]["feed_forward"], 512) << "the resolved configuration shows the value";
  EXPECT_EQ(config.vocabulary, std::nullopt);
}

TEST(Config, RunSeedIsStrongerThanRandomSeed) {
  const Config config = with(R"("random_seed": 7, "run": {"seed": 8})");
  EXPECT_EQ(config.run.seed, 8u);
  EXPECT_EQ(config.resolved["random_seed"], 8);
}

TEST(Config, ChoosesSuffixesByTheData) {
  EXPECT_TRUE(plain().data.suffixes.empty());
  EXPECT_EQ(config_of(R"({"data": {"path": "python:stdlib"}})").data.suffixes, std::vector<std::string>{".py"});
  EXPECT_EQ(config_of(R"({"data": {"path": "x", "format": "uint16"}})").data.suffixes,
            std::vector<std::string>{".bin"});
  EXPECT_TRUE(config_of(R"({"data": {"path": "python:stdlib", "suffixes": []}})").data.suffixes.empty());
}

TEST(Config, AMixtureHasAWeightForEachPath) {
  EXPECT_TRUE(config_of(R"({"data": {"path": ["a", "b"]}})").data.weights.empty());
  EXPECT_EQ(config_of(R"({"data": {"path": ["a", "b"], "weights": [3, 0.5]}})").data.weights,
            (std::vector<double>{3, 0.5}));
  EXPECT_EQ(error_of([] { config_of(R"({"data": {"path": ["a", "b"], "weights": [1]}})"); }),
            "[configuration] data.weights: has 1 entries, but data.path has 2; give one for each");
  EXPECT_EQ(error_of([] { config_of(R"({"data": {"path": ["a", "b"], "weights": [1, 0]}})"); }),
            "[configuration] data.weights[1]: must be more than 0, but is 0");
}

TEST(Config, StrategyComesFromDegreeNameOrDegrees) {
  using mesh::Degrees;
  EXPECT_EQ(strategy_of(plain(), 4).degrees, (Degrees{4, 4, 4}));
  EXPECT_EQ(strategy_of(with(R"("hybrid_shard_degree": 1)"), 4).degrees, (Degrees{1, 1, 1}));
  EXPECT_EQ(strategy_of(with(R"("hybrid_shard_degree": 2)"), 4).degrees, (Degrees{2, 2, 2}));
  EXPECT_EQ(strategy_of(with(R"("sharding": {"strategy": "ZERO_2"})"), 4).degrees, (Degrees{1, 4, 4}));
  EXPECT_EQ(strategy_of(with(R"("hybrid_shard_degree": 2, "sharding": {"strategy": "ZERO_PP"})"), 4).degrees,
            (Degrees{2, 4, 4}));
  const auto raw = strategy_of(with(R"("degrees": {"parameters": 1, "gradients": 2, "optimizer": 4})"), 4);
  EXPECT_EQ(raw.degrees, (Degrees{1, 2, 4}));
  EXPECT_TRUE(raw.free_after_forward);
}

TEST(Config, TiersAndTheMemoryLimit) {
  EXPECT_EQ(plain().offload.tiers, offload::Tiers());
  EXPECT_EQ(plain().offload.memory_limit, std::nullopt);
  const Config config = with(R"("offload": {"optimizer": "disk", "folder": "/scratch"}, "memory_limit": "1.5 GiB")");
  EXPECT_EQ(config.offload.tiers, (offload::Tiers{.optimizer = offload::Tier::disk}));
  EXPECT_EQ(config.offload.folder, "/scratch");
  EXPECT_EQ(config.offload.memory_limit, 3 << 29);
  EXPECT_EQ(with(R"("memory_limit": "800MB")").offload.memory_limit, 800'000'000);
  EXPECT_EQ(with(R"("memory_limit": "4096")").offload.memory_limit, 4096);
  EXPECT_EQ(with(R"("memory_limit": 4096)").offload.memory_limit, 4096);
  for (const char* limit : {"much", "-1GiB", "5 parsecs", "0.1"}) {
    EXPECT_THROW(with(cat(R"("memory_limit": ")", limit, R"(")")), ConfigError) << limit;
  }
  EXPECT_THROW(with(R"("offload": {"optimizer": "disk"}, "hybrid_shard_degree": "auto")"), ConfigError);
  EXPECT_THROW(with(R"("offload": {"optimizer": "disk"}, "checkpoint": {"memory_every_steps": 1})"), ConfigError);
}

TEST(Config, AFolderByWhichAnotherHostTakesOverNeedsALeastNumberOfRanks) {
  EXPECT_EQ(plain().recovery.shared, "");
  EXPECT_EQ(with(R"("recovery": {"shared": "/fsx", "min_ranks": 2})").recovery.shared, "/fsx");
  EXPECT_THROW(with(R"("recovery": {"shared": "/fsx", "replacements": 2})"), ConfigError);
}

TEST(Config, AutoBeginsWithWhateverIsChosenLater) {
  const Config config = with(R"("hybrid_shard_degree": "auto", "dial": {"headroom": 0.2, "planned_steps": 5000})");
  EXPECT_TRUE(config.sharding.automatic);
  EXPECT_EQ(config.planned_steps, 5000);
  EXPECT_EQ(config.dial_headroom, 0.2);
  EXPECT_EQ(strategy_of(config, 4).degrees, (mesh::Degrees{4, 4, 4}));
  EXPECT_FALSE(plain().sharding.automatic);
  EXPECT_EQ(plain().dial_headroom, 0.1);
}

TEST(Config, TheScheduleIsStepsAndDegrees) {
  const Config config = with(R"("dial": {"schedule": [{"step": 200, "hybrid_shard_degree": 4},
      {"step": 400, "degrees": {"parameters": 1, "gradients": 2, "optimizer": 4}}]})");
  using Change = std::pair<int64_t, mesh::Degrees>;
  EXPECT_EQ(dial_schedule(config.resolved, 4), (std::vector<Change>{{200, {4, 4, 4}}, {400, {1, 2, 4}}}));
  EXPECT_TRUE(dial_schedule(plain().resolved, 4).empty());
  EXPECT_EQ(error_of([&] { dial_schedule(config.resolved, 6); }),
            "[configuration] dial.schedule[0].hybrid_shard_degree: hybrid_shard_degree=4 does not divide the 6 ranks; "
            "nearest valid: 3, 6");
  const std::string error = error_of([] {
    dial_schedule(with(R"("dial": {"schedule": [{"step": 1, "hybrid_shard_degree": 1},
        {"step": 2, "degrees": {"parameters": 4, "gradients": 2, "optimizer": 4}}]})")
                      .resolved,
                  4);
  });
  EXPECT_TRUE(error.starts_with("[configuration] dial.schedule[1].degrees: ")) << error;
  EXPECT_NE(error.find("nearest valid: "), std::string::npos) << error;
}

TEST(Config, LifetimesOverrideTheStrategy) {
  EXPECT_FALSE(strategy_of(with(R"("sharding": {"strategy": "SHARD_GRAD_OP"})"), 2).free_after_forward);
  const auto kept = strategy_of(with(R"("sharding": {"free_after_forward": false, "free_after_backward": false})"), 2);
  EXPECT_FALSE(kept.free_after_forward);
  EXPECT_FALSE(kept.free_after_backward);
}

TEST(Config, PrecisionByNameAndByDtype) {
  EXPECT_EQ(precision_of(with(R"("precision": "auto")"), true).parameters, at::kBFloat16);
  EXPECT_EQ(precision_of(with(R"("precision": "auto")"), false).parameters, std::nullopt);
  EXPECT_EQ(precision_of(with(R"("precision": "bf16")"), false).reduce, at::kFloat);
  EXPECT_EQ(precision_of(with(R"("precision": "fp16")"), false).parameters, at::kHalf);
  const auto custom = precision_of(with(R"("precision": {"parameters": "bf16"})"), false);
  EXPECT_EQ(custom.parameters, at::kBFloat16);
  EXPECT_EQ(custom.reduce, at::kBFloat16);
  EXPECT_EQ(custom.masters, at::kFloat);
}

TEST(Config, CheckpointsAreOnOnceAKeySaysWhenOrWhere) {
  EXPECT_FALSE(plain().checkpoint.enabled());
  EXPECT_FALSE(with(R"("checkpoint": {"keep": 5, "async": false, "on_error": "continue"})").checkpoint.enabled());
  for (const char* key :
       {R"("folder": "x")", R"("every_steps": 5)", R"("every_minutes": 0.5)", R"("memory_every_steps": 2)"}) {
    EXPECT_TRUE(with(cat(R"("checkpoint": {)", key, "}")).checkpoint.enabled()) << key;
  }
  const Config::Checkpoint c = with(R"("checkpoint": {"folder": "x", "on_error": "continue"})").checkpoint;
  EXPECT_EQ(c.folder, "x");
  EXPECT_EQ(c.keep, 3);
  EXPECT_TRUE(c.asynchronous);
  EXPECT_FALSE(c.stop_on_error);
}

TEST(Config, ImpossibleDegreesNameTheKeyAndTheNearestValid) {
  EXPECT_EQ(
      error_of([] { strategy_of(with(R"("hybrid_shard_degree": 3)"), 4); }),
      "[configuration] hybrid_shard_degree: hybrid_shard_degree=3 does not divide the 4 ranks; nearest valid: 2, 4");
  EXPECT_EQ(
      error_of([] { strategy_of(with(R"("hybrid_shard_degree": 8, "sharding": {"strategy": "HYBRID_SHARD"})"), 4); }),
      "[configuration] hybrid_shard_degree: the degree of HYBRID_SHARD=8 does not divide the 4 ranks; nearest valid: "
      "4");
  const std::string error =
      error_of([] { strategy_of(with(R"("degrees": {"parameters": 2, "gradients": 3, "optimizer": 4})"), 4); });
  EXPECT_TRUE(error.starts_with("[configuration] degrees: ")) << error;
  EXPECT_NE(error.find("P=2 G=2 O=4"), std::string::npos) << error;
}

struct Contradiction {
  const char* keys;
  const char* error;
};
class Contradictory : public testing::TestWithParam<Contradiction> {};

TEST_P(Contradictory, IsAnError) {
  EXPECT_EQ(error_of([] { with(GetParam().keys); }), std::string("[configuration] ") + GetParam().error);
}

INSTANTIATE_TEST_SUITE_P(
    Keys, Contradictory,
    testing::Values(
        Contradiction{R"("hybrid_shard_degree": 2, "degrees": {"parameters": 1, "gradients": 1, "optimizer": 2})",
                      "degrees: contradicts hybrid_shard_degree = 2: give one of them"},
        Contradiction{
            R"("sharding": {"strategy": "ZERO_1"}, "degrees": {"parameters": 1, "gradients": 1, "optimizer": 2})",
            "degrees: contradicts sharding.strategy = ZERO_1: give one of them"},
        Contradiction{R"("hybrid_shard_degree": 2, "sharding": {"strategy": "ZERO_1"})",
                      "sharding.strategy: ZERO_1 contradicts hybrid_shard_degree = 2: give one of them"},
        Contradiction{R"("sharding": {"strategy": "HYBRID_SHARD"})",
                      "hybrid_shard_degree: must be given with sharding.strategy = HYBRID_SHARD: it is its degree"},
        Contradiction{R"("model": {"dimension": 100, "heads": 3})",
                      "model: dimension 100 / heads 3 is no even number; rotary positions turn pairs of features"},
        Contradiction{R"("model": {"dimension": 12, "heads": 4})",
                      "model: dimension 12 / heads 4 is no even number; rotary positions turn pairs of features"},
        Contradiction{R"("model": {"heads": 4, "kv_heads": 3})", "model: kv_heads 3 does not divide heads 4"},
        Contradiction{R"("train": {"eval_every": 5, "eval_batches": 0})",
                      "train.eval_every: is 5, but train.eval_batches is 0: there is nothing to evaluate"},
        Contradiction{R"("hybrid_shard_degree": "auto", "degrees": {"parameters": 1, "gradients": 1, "optimizer": 2})",
                      "degrees: contradicts hybrid_shard_degree = \"auto\": give one of them"},
        Contradiction{R"("hybrid_shard_degree": "auto", "sharding": {"strategy": "ZERO_1"})",
                      "sharding.strategy: ZERO_1 contradicts hybrid_shard_degree = \"auto\": give one of them"},
        Contradiction{R"("hybrid_shard_degree": "auto", "dial": {"schedule": [{"step": 2, "hybrid_shard_degree": 2}]})",
                      "dial.schedule: contradicts hybrid_shard_degree = \"auto\": give one of them"},
        Contradiction{R"("dial": {"schedule": [{"step": 2}]})",
                      "dial.schedule[0]: must have either hybrid_shard_degree or degrees"},
        Contradiction{R"("dial": {"schedule": [{"step": 2, "hybrid_shard_degree": 2,
                          "degrees": {"parameters": 1, "gradients": 1, "optimizer": 2}}]})",
                      "dial.schedule[0]: must have either hybrid_shard_degree or degrees"},
        Contradiction{R"("dial": {"schedule": [{"step": 3, "hybrid_shard_degree": 2},
                                               {"step": 3, "hybrid_shard_degree": 4}]})",
                      "dial.schedule[1].step: must be more than that of the entry before, 3, but is 3"},
        Contradiction{R"("expert_parallel_degree": 2)",
                      "expert_parallel_degree: is 2, but the model has no experts: set model.experts"},
        Contradiction{R"("model": {"experts": 2, "experts_per_token": 3})",
                      "model: experts_per_token is 3; it must be <= experts, 2"},
        Contradiction{R"("context_parallel_degree": 2, "model": {"experts": 4, "capacity_factor": 1.5})",
                      "model.capacity_factor: drops the last tokens of a batch, whose order context ranks do not keep: "
                      "take 0, or context_parallel_degree 1"}));

TEST(Config, ActivationsLeaveWhereThatIsAskedFor) {
  EXPECT_FALSE(with(R"("activation_loading_horizon": 4)").offload.activations);
  const Config asked = with(R"("activation_loading_horizon": 3, "offload": {"activations": true})");
  EXPECT_TRUE(asked.offload.activations);
  EXPECT_EQ(asked.offload.horizon, 3);
  EXPECT_EQ(asked.offload.smallest, 1 << 20);
  EXPECT_TRUE(asked.offload.leaves("root"));
  const Config chosen = with(R"("offload": {"activation_size": "4MB", "activation_units": ["blocks.1*", "head"]})");
  EXPECT_EQ(chosen.offload.smallest, 4'000'000);
  EXPECT_TRUE(chosen.offload.leaves("blocks.12"));
  EXPECT_FALSE(chosen.offload.leaves("blocks.2"));
  EXPECT_EQ(with(R"("offload": {"activation_size": 65536})").offload.smallest, 65536);
  EXPECT_THROW(with(R"("offload": {"activation_size": "much"})"), ConfigError);
  EXPECT_EQ(with(R"("offload": {"folder": "/scratch"})").offload.folder, "/scratch");
}

TEST(Config, HarmlessValuesOfKeysOfSmpAreTaken) {
  for (const char* keys :
       {R"("sm_activation_offloading": true)", R"("sm_activation_offloading": false)",
        R"("activation_loading_horizon": 4)", R"("allow_empty_shards": true)",
        R"("tensor_parallel_degree": 1, "context_parallel_degree": 1, "expert_parallel_degree": 1)"}) {
    EXPECT_NO_THROW(with(keys)) << keys;
  }
  EXPECT_TRUE(with(R"("fsdp_cache_flush_warnings": true)").sharding.warn_of_pool_misses);
}

}  // namespace
}  // namespace tesserae::config
