#include "tesserae/config/config_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "tesserae/os/files.h"
#include "tests/config/documents.h"

namespace tesserae::config {
namespace {

class ConfigFile : public testing::Test {
 protected:
  ConfigFile() { os::files().make_directories(folder_); }
  ~ConfigFile() override { os::files().remove_all(folder_); }

  std::string file(const std::string& text) {
    os::files().write(folder_ + "/job.json", text);
    return folder_ + "/job.json";
  }

  const std::string folder_ = testing::TempDir() + "/tesserae-config-" + std::to_string(::getpid());
};

TEST_F(ConfigFile, SkipsComments) {
  EXPECT_EQ(read_config_file(file("// a job\n{\"train\": {\"steps\": 5 /* few */}}"))["train"]["steps"], 5);
}

TEST_F(ConfigFile, ErrorsNameFileLineAndColumn) {
  const std::string path = file("{\n  \"train\": {\"steps\": }\n}");
  const std::string error = error_of([&] { read_config_file(path); });
  EXPECT_TRUE(error.starts_with("[configuration] " + path + ":2:22: no valid JSON: syntax error")) << error;
  EXPECT_EQ(error.find('\n'), std::string::npos);
}

TEST_F(ConfigFile, AKeyThatStandsTwiceIsAnError) {
  const std::string path = file(R"({"train": {"steps": 5}, "run": {"steps": 1}, "train": {}})");
  EXPECT_EQ(error_of([&] { read_config_file(path); }),
            "[configuration] " + path + ": the key \"train\" stands twice in one object");
}

TEST_F(ConfigFile, MissingFileAndOtherJson) {
  const std::string missing = error_of([&] { read_config_file(folder_ + "/none.json"); });
  EXPECT_NE(missing.find("/none.json"), std::string::npos) << missing;
  EXPECT_NE(missing.find("No such file"), std::string::npos) << missing;
  const std::string path = file("[1, 2]");
  EXPECT_EQ(error_of([&] { read_config_file(path); }),
            "[configuration] " + path + ": must be a JSON object, but is [1,2]");
}

TEST_F(ConfigFile, AssignmentsApplyInOrderOverTheFile) {
  const std::string path = file(R"({"data": {"path": "x"}, "precision": "bf16", "train": {"steps": 5}})");
  const Json resolved =
      resolve_config(path, {"train.steps=50", "train.steps=60", "precision.reduce=fp32", "data.path=[\"a\", \"b\"]"});
  EXPECT_EQ(resolved["train"]["steps"], 60);
  EXPECT_EQ(resolved["precision"], Json::parse(R"({"parameters": "bf16", "reduce": "fp32", "masters": "fp32"})"));
  EXPECT_EQ(resolved["data"]["path"], Json::parse(R"(["a", "b"])"));
}

TEST_F(ConfigFile, AKeyOfThePrecisionChangesWhatItsNameStandsFor) {
  const auto resolved = [&](const std::string& name, const std::vector<std::string>& assignments) {
    return resolve_config(file(R"({"data": {"path": "x"}, "precision": ")" + name + "\"}"), assignments)["precision"];
  };
  for (const std::string name : {"fp32", "bf16", "fp16"}) {
    EXPECT_EQ(resolved(name, {"precision.masters=bf16"})["parameters"], name);
  }
  EXPECT_EQ(resolved("fp16", {"precision.masters=fp32"}),
            Json::parse(R"({"parameters": "fp16", "reduce": "fp16", "masters": "fp32"})"));
  EXPECT_EQ(resolved("auto", {"precision.parameters=bf16", "precision.reduce=fp32"})["parameters"], "bf16");
  EXPECT_EQ(error_of([&] { resolved("auto", {"precision.reduce=fp32"}); }),
            "[configuration] precision: is auto, so that \"precision.reduce=fp32\" leaves open what is computed in: "
            "name that first (--set precision=bf16)");
}

TEST_F(ConfigFile, ANumberThatIsTooLarge) {
  const std::string path = file(R"({"optimizer": {"clip_norm": 1e999}})");
  EXPECT_EQ(error_of([&] { read_config_file(path); }), "[configuration] " + path + ": number overflow parsing '1e999'");
  const std::string counts = file(R"({"data": {"path": "x"}, "checkpoint": {"keep": 4294967297}})");
  EXPECT_EQ(error_of([&] { resolve_config(counts, {}); }),
            "[configuration] checkpoint.keep: must be at most 1048576, but is 4294967297");
}

TEST(SetKey, ReadsJsonAndElseText) {
  Json document = Json::object();
  for (const char* assignment :
       {"a.number=1e-3", "a.truth=true", "a.text=bf16", "a.quoted=\"7\"", "a.empty=", "a.equals=b=c"}) {
    set_key(document, assignment);
  }
  EXPECT_EQ(document["a"], Json::parse(R"({"number": 1e-3, "truth": true, "text": "bf16", "quoted": "7", "empty": "",
                                           "equals": "b=c"})"));
}

TEST(SetKey, RefusesWhatIsNoAssignment) {
  for (const char* wrong : {"train.steps", "=5", ".steps=5", "train.=5", "train..steps=5"}) {
    Json document = Json::object();
    EXPECT_EQ(error_of([&] { set_key(document, wrong); }),
              cat("[configuration] --set takes KEY=VALUE, for example train.steps=50, but got \"", wrong, "\""));
  }
}

}  // namespace
}  // namespace tesserae::config
