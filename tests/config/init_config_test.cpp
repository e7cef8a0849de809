#include "tesserae/config/init_config.h"

#include <gtest/gtest.h>

#include "tests/config/documents.h"

namespace tesserae::config {
namespace {

Json resolved(const char* text) {
  return validate_init_config(Json::parse(text));
}

TEST(InitConfig, IsFilledWithTheDefaultsOfSmp) {
  EXPECT_EQ(resolved("{}"), Json::parse(R"({
    "hybrid_shard_degree": 0, "sm_activation_offloading": true, "activation_loading_horizon": 2,
    "fsdp_cache_flush_warnings": true, "allow_empty_shards": false, "tensor_parallel_degree": 1,
    "context_parallel_degree": 1, "expert_parallel_degree": 1, "random_seed": 12345,
    "context_parallel_method": "auto", "degrees": null, "$comment": "",
    "run": {"folder": null, "connect_deadline_seconds": 60, "deadline_seconds": 300},
    "wire": {"parameters": "exact", "gradients": "exact"},
    "offload": {"optimizer": "device", "folder": null, "activation_size": 1048576}, "memory_limit": null,
    "dial": {"headroom": 0.1, "planned_steps": 0, "schedule": []},
    "preemption": {"file": null, "command": null, "every_seconds": 5, "exit_code": 0},
    "monitor": {"enabled": null, "every_seconds": 0.5, "port": null, "host": "127.0.0.1", "allow_control": false},
    "cpu_bf16_products": "torch"})"));
}

TEST(InitConfig, TakesEveryKeyOfSmp) {
  const Json config = resolved(R"({
    "hybrid_shard_degree": 16, "sm_activation_offloading": false, "activation_loading_horizon": 4,
    "fsdp_cache_flush_warnings": false, "allow_empty_shards": true, "tensor_parallel_degree": 1,
    "context_parallel_degree": 1, "expert_parallel_degree": 1, "random_seed": 7})");
  EXPECT_EQ(config["hybrid_shard_degree"], 16);
  EXPECT_EQ(config["random_seed"], 7);
}

TEST(InitConfig, TakesRawDegreesAndDeadlines) {
  const Json config = resolved(R"({"degrees": {"parameters": 2, "gradients": 4, "optimizer": 8},
                                   "run": {"deadline_seconds": 5}, "$comment": ["why"]})");
  EXPECT_EQ(config["degrees"]["gradients"], 4);
  EXPECT_EQ(config["run"]["deadline_seconds"], 5);
}

TEST(InitConfig, TakesAllAxesAtOnce) {
  const Json config =
      resolved(R"({"tensor_parallel_degree": 2, "context_parallel_degree": 2, "expert_parallel_degree": 4})");
  EXPECT_EQ(config["tensor_parallel_degree"], 2);
  EXPECT_EQ(config["expert_parallel_degree"], 4);
}

TEST(InitConfig, TakesTheDial) {
  const Json config = resolved(R"({"hybrid_shard_degree": "auto", "dial": {"headroom": 0.25}})");
  EXPECT_EQ(config["hybrid_shard_degree"], "auto");
  EXPECT_EQ(config["dial"]["headroom"], 0.25);
  EXPECT_EQ(resolved(R"({"expert_parallel_degree": 2, "hybrid_shard_degree": "auto"})")["expert_parallel_degree"], 2);
  EXPECT_EQ(
      resolved(R"({"dial": {"schedule": [{"step": 7, "hybrid_shard_degree": 2}]}})")["dial"]["schedule"][0]["step"], 7);
}

struct WrongInit {
  const char* what;
  const char* document;
  const char* error;
};

class WrongInitConfig : public testing::TestWithParam<WrongInit> {};

TEST_P(WrongInitConfig, NamesTheKey) {
  EXPECT_EQ(error_of([] { resolved(GetParam().document); }), std::string("[configuration] ") + GetParam().error);
}

INSTANTIATE_TEST_SUITE_P(
    Errors, WrongInitConfig,
    testing::Values(
        WrongInit{"misspelt", R"({"hybrid_shard_degre": 2})",
                  "hybrid_shard_degre: unknown key; did you mean hybrid_shard_degree?"},
        WrongInit{"in_no_section", R"({"deadline_seconds": 2})",
                  "deadline_seconds: unknown key; did you mean run.deadline_seconds?"},
        WrongInit{
            "of_the_command_line", R"({"precision": "bf16"})",
            "precision: is read by `tesserae train` only (as precision): a script says that itself, and tsm.init does "
            "not take it"},
        WrongInit{
            "of_a_section_of_the_command_line", R"({"run": {"device": "cpu"}})",
            "run.device: is read by `tesserae train` only (as run.device): a script says that itself, and tsm.init "
            "does not take it"},
        WrongInit{
            "of_a_section_without_it", R"({"steps": 5})",
            "steps: is read by `tesserae train` only (as train.steps): a script says that itself, and tsm.init does "
            "not take it"},
        WrongInit{"no_object", "[2]", "must be a JSON object, but is [2]"},
        WrongInit{"negative_degree", R"({"hybrid_shard_degree": -1})",
                  "hybrid_shard_degree: must be at least 0, but is -1"},
        WrongInit{"degree_of_yes", R"({"hybrid_shard_degree": true})",
                  "hybrid_shard_degree: must be an integer or \"auto\", but is true"},
        WrongInit{"two_plans",
                  R"({"hybrid_shard_degree": "auto", "dial": {"schedule": [{"step": 1, "hybrid_shard_degree": 1}]}})",
                  "dial.schedule: contradicts hybrid_shard_degree = \"auto\": give one of them"},
        WrongInit{"schedule_without_degree", R"({"dial": {"schedule": [{"step": 1}]}})",
                  "dial.schedule[0]: must have either hybrid_shard_degree or degrees"},
        WrongInit{"activations", R"({"offload": {"activations": true}})",
                  "offload.activations: is read by `tesserae train` only (as offload.activations): a script says that "
                  "itself, and tsm.init does not take it"},
        WrongInit{"no_horizon", R"({"activation_loading_horizon": 0})",
                  "activation_loading_horizon: must be at least 1, but is 0"},
        WrongInit{"taken_exit_code", R"({"preemption": {"exit_code": 2}})",
                  "preemption.exit_code: is 2, which says that a run failed: take 0, or 4 to 255, for example 75"},
        WrongInit{"two_dials",
                  R"({"hybrid_shard_degree": 2, "degrees": {"parameters": 1, "gradients": 1, "optimizer": 2}})",
                  "degrees: contradicts hybrid_shard_degree = 2: give one of them"},
        WrongInit{"half_a_dial", R"({"degrees": {"parameters": 1}})",
                  "degrees.gradients: is missing; it must be an integer"},
        WrongInit{"deadline", R"({"run": {"deadline_seconds": 0}})",
                  "run.deadline_seconds: must be more than 0, but is 0"}),
    [](const auto& info) { return info.param.what; });

}  // namespace
}  // namespace tesserae::config
