#include "tesserae/config/validate.h"

#include <gtest/gtest.h>

#include "tests/config/documents.h"

namespace tesserae::config {
namespace {

struct WrongCase {
  const char* what;
  const char* document;
  const char* error;
};

class WrongDocument : public testing::TestWithParam<WrongCase> {};

TEST_P(WrongDocument, GivesOneLineThatSaysWhatAndWhere) {
  EXPECT_EQ(error_of([] { config_of(GetParam().document); }), std::string("[configuration] ") + GetParam().error);
}

INSTANTIATE_TEST_SUITE_P(
    Errors, WrongDocument,
    testing::Values(
        WrongCase{"misspelt", R"({"data": {"path": "x"}, "train": {"stpes": 5}})",
                  "train.stpes: unknown key; did you mean train.steps?"},
        WrongCase{"wrong_section", R"({"data": {"path": "x"}, "steps": 5})",
                  "steps: unknown key; did you mean train.steps?"},
        WrongCase{"unknown_section", R"({"data": {"path": "x"}, "optimiser": {"lr": 1}})",
                  "optimiser: unknown key; did you mean optimizer?"},
        WrongCase{"missing", R"({})", "data.path: is missing; it must be text or a list"},
        WrongCase{"not_an_object", R"([1])", "must be a JSON object, but is [1]"},
        WrongCase{"section_is_number", R"({"data": {"path": "x"}, "train": 5})", "train: must be an object, but is 5"},
        WrongCase{"text_for_integer", R"({"data": {"path": "x"}, "train": {"steps": "many"}})",
                  "train.steps: must be an integer, but is \"many\""},
        WrongCase{"fraction_for_integer", R"({"data": {"path": "x"}, "train": {"steps": 1.5}})",
                  "train.steps: must be an integer, but is 1.5"},
        WrongCase{"huge_integer", R"({"data": {"path": "x"}, "train": {"steps": 18446744073709551615}})",
                  "train.steps: must be an integer, but is 18446744073709551615"},
        WrongCase{"boolean_for_number", R"({"data": {"path": "x"}, "optimizer": {"lr": true}})",
                  "optimizer.lr: must be a number, but is true"},
        WrongCase{"null_for_integer", R"({"data": {"path": "x"}, "train": {"steps": null}})",
                  "train.steps: must be an integer, but is null"},
        WrongCase{"number_for_nullable", R"({"data": {"path": "x"}, "run": {"folder": 1}})",
                  "run.folder: must be text or null, but is 1"},
        WrongCase{"below", R"({"data": {"path": "x"}, "train": {"steps": 0}})",
                  "train.steps: must be at least 1, but is 0"},
        WrongCase{"above", R"({"data": {"path": "x", "validation_fraction": 0.75}})",
                  "data.validation_fraction: must be at most 0.5, but is 0.75"},
        WrongCase{"not_above", R"({"data": {"path": "x"}, "run": {"deadline_seconds": 0}})",
                  "run.deadline_seconds: must be more than 0, but is 0"},
        WrongCase{"not_below", R"({"data": {"path": "x"}, "model": {"dropout": 1}})",
                  "model.dropout: must be less than 1, but is 1"},
        WrongCase{"enum_with_hint", R"({"data": {"path": "x"}, "optimizer": {"name": "adam"}})",
                  "optimizer.name: must be one of \"adamw\", \"sgd\", but is \"adam\"; did you mean \"adamw\"?"},
        WrongCase{"enum_without_hint", R"({"data": {"path": "x"}, "run": {"device": "quantum"}})",
                  "run.device: must be one of \"auto\", \"cpu\", \"cuda\", but is \"quantum\""},
        WrongCase{"empty_text", R"({"data": {"path": ""}})", "data.path: must not be empty"},
        WrongCase{"empty_list", R"({"data": {"path": []}})", "data.path: must have at least 1 entry, but is []"},
        WrongCase{"entry_of_list", R"({"data": {"path": ["x", 3]}})", "data.path[1]: must be text, but is 3"},
        WrongCase{"no_alternative", R"({"data": {"path": 3}})", "data.path: must be text or a list, but is 3"},
        WrongCase{"length_of_list", R"({"data": {"path": "x"}, "optimizer": {"betas": [0.9]}})",
                  "optimizer.betas: must have 2 entries, but is [0.9]"},
        WrongCase{"degree_below", R"({"data": {"path": "x"}, "hybrid_shard_degree": -1})",
                  "hybrid_shard_degree: must be at least 0, but is -1"},
        WrongCase{"degree_text", R"({"data": {"path": "x"}, "hybrid_shard_degree": "all"})",
                  "hybrid_shard_degree: must be an integer or \"auto\", but is \"all\""},
        WrongCase{"precision_name", R"({"data": {"path": "x"}, "precision": "fp8"})",
                  "precision: must be one of \"fp32\", \"bf16\", \"fp16\", \"auto\" or an object, but is \"fp8\""},
        WrongCase{"precision_object", R"({"data": {"path": "x"}, "precision": {"gradients": "bf16"}})",
                  "precision.gradients: unknown key; did you mean degrees.gradients?"},
        WrongCase{"degrees_incomplete", R"({"data": {"path": "x"}, "degrees": {"parameters": 2}})",
                  "degrees.gradients: is missing; it must be an integer"},
        WrongCase{
            "long_value",
            R"({"data": {"path": "x"}, "train": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"})",
            "train: must be an object, but is \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."}),
    [](const auto& info) { return info.param.what; });

TEST(Validate, FillsEveryDefaultInTheOrderOfTheSchema) {
  const Json resolved = validate(config_schema(), Json::parse(R"({"train": {"steps": 7}, "data": {"path": "x"}})"));
  EXPECT_EQ(resolved["train"]["steps"], 7);
  EXPECT_EQ(resolved["train"]["batch_per_rank"], 8);
  EXPECT_EQ(resolved["precision"], "fp32");
  EXPECT_EQ(resolved.begin().key(), "hybrid_shard_degree");
  EXPECT_EQ(validate(config_schema(), resolved), resolved) << "a resolved configuration resolves to itself";
}

TEST(Validate, TakesAWholeFloatAsAnInteger) {
  const Json resolved = validate(config_schema(), Json::parse(R"({"train": {"steps": 1e3}, "data": {"path": "x"}})"));
  EXPECT_TRUE(resolved["train"]["steps"].is_number_integer());
  EXPECT_EQ(resolved["train"]["steps"], 1000);
}

TEST(Validate, RefusesASchemaThatSaysMoreThanItUnderstands) {
  const Json schema = Json::parse(R"({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}})");
  EXPECT_THROW(validate(schema, Json::parse(R"({"a": "x"})")), std::logic_error);
}

}  // namespace
}  // namespace tesserae::config
