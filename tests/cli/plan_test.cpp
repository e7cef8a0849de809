#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tesserae/os/files.h"
#include "tests/train/run_program.h"

// `tesserae plan --model FILE`: what files it takes, and what it refuses to count wrongly.

namespace tesserae {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class PlanOfFile : public testing::Test {
 protected:
  PlanOfFile() { os::files().make_directories(folder_); }
  ~PlanOfFile() override { os::files().remove_all(folder_); }

  Program plan(const json& document, const std::vector<std::string>& options = {}) {
    os::files().write(folder_ + "/model.json", document.dump());
    std::vector<std::string> words = {TESSERAE_PROGRAM, "plan", "--json", "--model", folder_ + "/model.json"};
    words.insert(words.end(), options.begin(), options.end());
    return Program(words);
  }

  json planned(const json& document, const std::vector<std::string>& options = {}) {
    Program program = plan(document, options);
    const auto exit = program.finish();
    EXPECT_TRUE(exit && exit->success()) << program.errors;
    return json::parse(program.output);
  }

  void expect_refused(const json& document, const std::string& what, const std::vector<std::string>& options = {}) {
    Program program = plan(document, options);
    const auto exit = program.finish();
    EXPECT_EQ(exit ? exit->code : -1, 2) << program.output;
    EXPECT_THAT(program.errors, HasSubstr(what));
    EXPECT_EQ(program.errors.find('\n'), program.errors.size() - 1) << "one line: " << program.errors;
  }

  /// Of Hugging Face's, with these changes.
  static json hugging_face(const json& changes = json::object()) {
    json document = {{"model_type", "llama"},     {"hidden_size", 64},        {"num_hidden_layers", 3},
                     {"num_attention_heads", 8},  {"num_key_value_heads", 4}, {"intermediate_size", 96},
                     {"vocab_size", 100},         {"rms_norm_eps", 1e-5},     {"tie_word_embeddings", false},
                     {"torch_dtype", "bfloat16"}, {"rope_theta", 10000.0}};
    for (const auto& [key, value] : changes.items()) document[key] = value;
    return document;
  }

  /// Of ours, of the same shape, with these sections.
  static json ours(const json& sections = json::object()) {
    json document = {{"model",
                      {{"dimension", 64},
                       {"layers", 3},
                       {"heads", 8},
                       {"kv_heads", 4},
                       {"feed_forward", 96},
                       {"vocabulary", 100},
                       {"tied", false}}},
                     {"data", {{"path", "nowhere.txt"}}}};
    document.merge_patch(sections);
    return document;
  }

  /// What the program plans where nobody says what a step is.
  static json usual_step() {
    return {{"model", {{"checkpoint_activations", true}}},
            {"data", {{"sequence_length", 4096}}},
            {"precision", {{"parameters", "bf16"}, {"reduce", "bf16"}}},
            {"train", {{"batch_per_rank", 128}, {"accumulation", "two_hop"}}}};
  }

  const std::string folder_ = testing::TempDir() + "/tesserae-plan-" + std::to_string(::getpid());
};

// 3 blocks of 2 * 64^2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64, embedding and head of 100 * 64, the last norm.
constexpr int64_t parameters = 3 * (8192 + 4096 + 18432 + 128) + 2 * 6400 + 64;

TEST_F(PlanOfFile, OursAndHuggingFaces) {
  const json expected = planned(ours(usual_step()), {"--micro-batch", "0"});
  EXPECT_EQ(expected["model"]["parameters"], parameters);
  EXPECT_EQ(planned(hugging_face()), expected);
  EXPECT_EQ(planned(hugging_face({{"model_type", "mistral"}, {"sliding_window", 4096}})), expected);
  EXPECT_EQ(planned(hugging_face({{"head_dim", 8}, {"num_local_experts", 1}})), expected);
  EXPECT_EQ(planned(hugging_face({{"head_dim", nullptr}})), expected);
  EXPECT_EQ(planned(hugging_face({{"tie_word_embeddings", true}}))["model"]["parameters"], parameters - 6400);
  EXPECT_EQ(planned(hugging_face({{"num_key_value_heads", nullptr}}))["model"]["parameters"],
            parameters + 3 * 2 * 64 * 32);
}

TEST_F(PlanOfFile, MixturesOfExperts) {
  json mixture = ours(usual_step());
  mixture["model"].update({{"experts", 4}, {"experts_per_token", 2}});
  const json expected = planned(mixture, {"--micro-batch", "0"});
  // A router of 4 x 64, and three more layers of 3 x 64 x 96.
  EXPECT_EQ(expected["model"]["parameters"], parameters + 3 * (4 * 64 + 3 * 18432));
  EXPECT_EQ(planned(hugging_face({{"model_type", "mixtral"}, {"num_local_experts", 4}, {"num_experts_per_tok", 2}})),
            expected);
  for (const json& layout : expected["layouts"]) {
    EXPECT_EQ(layout["traffic"]["expert"]["bytes"].get<double>() > 0, layout["expert"] > 1) << layout;
  }
}

TEST_F(PlanOfFile, AConfigurationOfOursSaysWhatAStepIs) {
  const json config = ours({{"model", {{"checkpoint_activations", true}}},
                            {"data", {{"sequence_length", 96}}},
                            {"precision", "bf16"},
                            {"train", {{"batch_per_rank", 4}, {"accumulate", 3}, {"accumulation", "two_hop"}}},
                            {"optimizer", {{"name", "sgd"}, {"momentum", 0.9}}},
                            {"sharding", {{"sequence_parallel", false}, {"free_after_forward", false}}},
                            {"tensor_parallel_degree", 2}});
  const json step = planned(config, {"--devices", "8"})["step"];
  EXPECT_EQ(step, json({{"batch", 4 * 3 * (8 / 2)},
                        {"sequence", 96},
                        {"micro_batch", 4},
                        {"compute_bytes", 2},
                        {"reduce_bytes", 4},
                        {"master_bytes", 4},
                        {"state_bytes", 4.0},
                        {"recompute", true},
                        {"sequence_parallel", false},
                        {"two_hop", true},
                        {"free_after_forward", false}}));
  // The vocabulary of the data nobody has looked at.
  const json unsaid = ours({{"model", {{"vocabulary", nullptr}}}});
  for (const json& document : {unsaid, ours(), hugging_face()}) {
    EXPECT_EQ(planned(document, {"--vocabulary", "50"})["model"]["parameters"], parameters - 2 * 50 * 64);
  }

  // What is not written in the file has its default there, too.
  const json other = planned(ours())["step"];
  EXPECT_EQ(other["batch"], 8 * 8);
  EXPECT_EQ(other["sequence"], 256);
  EXPECT_EQ(other["compute_bytes"], 4);
  EXPECT_EQ(other["reduce_bytes"], 4);
  EXPECT_EQ(other["state_bytes"], 8.0);
  EXPECT_FALSE(other["recompute"]);
  EXPECT_FALSE(other["two_hop"]);

  // The command line goes first.
  const json said = planned(config, {"--batch", "64", "--sequence", "32", "--micro-batch", "2", "--dtype", "fp16",
                                     "--optimizer", "adamw", "--accumulation", "local", "--keep-activations",
                                     "--keep-gathered=false", "--no-sequence-parallel=false"})["step"];
  EXPECT_EQ(said, json({{"batch", 64},
                        {"sequence", 32},
                        {"micro_batch", 2},
                        {"compute_bytes", 2},
                        {"reduce_bytes", 2},
                        {"master_bytes", 4},
                        {"state_bytes", 8.0},
                        {"recompute", false},
                        {"sequence_parallel", true},
                        {"two_hop", false},
                        {"free_after_forward", true}}));
}

TEST_F(PlanOfFile, OptionsThatWouldChangeNothingAreRefused) {
  const std::vector<std::vector<std::string>> all = {{"--parameters", "7e9"}, {"--layers", "3"},   {"--dimension", "8"},
                                                     {"--heads", "2"},        {"--kv-heads", "2"}, {"--tied"}};
  for (const auto& words : all) {
    expect_refused(ours(), words[0] + " changes nothing of the model of a file: leave it out", words);
  }
  expect_refused(ours(), "--model changes nothing of a traced model", {"--traced", "-"});
}

TEST_F(PlanOfFile, AMicroBatchIsAPartOfTheBatch) {
  expect_refused(hugging_face(), "a micro-batch of 9223372036854775807 is more than the whole batch of 1024",
                 {"--micro-batch", "9223372036854775807"});
}

TEST_F(PlanOfFile, OtherShapesAreRefused) {
  expect_refused(hugging_face({{"model_type", "gpt_neox"}}),
                 "model.json: model_type = \"gpt_neox\"; the formulas are those of llama, mistral and mixtral");
  expect_refused({{"model_type", "gpt2"}, {"n_embd", 64}}, "model_type = \"gpt2\"; ");
  json untyped = hugging_face();
  untyped.erase("model_type");
  expect_refused(untyped, "model_type is missing; ");
  expect_refused(hugging_face({{"head_dim", 16}}),
                 "head_dim = 16 is not hidden_size / num_attention_heads = 64 / 8; the formulas have no other size");
  expect_refused(hugging_face({{"model_type", "qwen3_moe"}, {"num_experts", 8}}),
                 "num_experts = 8 with model_type \"qwen3_moe\": of the mixtures of experts mixtral alone");
  expect_refused(hugging_face({{"n_routed_experts", 64}}), "n_routed_experts = 64 with model_type \"llama\"");
  expect_refused(hugging_face({{"model_type", "mixtral"}, {"num_local_experts", 8}}), "num_experts_per_tok");
  expect_refused(hugging_face({{"attention_bias", true}}), "attention_bias is true; the formulas have no biases");
  expect_refused(hugging_face({{"hidden_size", 256.7}}), "hidden_size = 256.7 is no size");
  json without = hugging_face();
  without.erase("intermediate_size");
  expect_refused(without, "intermediate_size");
  expect_refused({{"model", {{"dimension", 64}}}, {"data", {{"path", "nowhere.txt"}}}}, "or --vocabulary");
}

}  // namespace
}  // namespace tesserae
