#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/train/train_job.h"

// The verbs that read and write checkpoints, on those of a small run.

namespace tesserae {
namespace {

using config::Json;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::StartsWith;
using train::TrainJob;

struct Said {
  int code = 0;
  std::string output, errors;
};

class CheckpointVerbs : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    job_ = new TrainJob("verbs");
    job_->run("run", {"--nproc", "2", "--set", "train.steps=4", "checkpoint.every_steps=2"});
  }
  static void TearDownTestSuite() {
    delete job_;
    job_ = nullptr;
  }

  static Said say(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), TESSERAE_PROGRAM);
    Program program(arguments, {{"OMP_NUM_THREADS", "1"}});
    const auto exit = program.finish();
    return {exit ? exit->code : -1, program.output, program.errors};
  }

  /// A copy of the run, to be damaged.
  std::string copy() const {
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    job_->copy("run", name);
    return name;
  }

  static std::string step(int64_t number, const std::string& run = "run") {
    return cat(job_->path(run), "/checkpoints/step-", number);
  }

  static TrainJob* job_;
};

TrainJob* CheckpointVerbs::job_ = nullptr;

TEST_F(CheckpointVerbs, InspectShowsOneAsATable) {
  const Said said = say({"inspect", step(4)});
  EXPECT_EQ(said.code, 0) << said.errors;
  EXPECT_THAT(said.output, StartsWith(step(4) + "\nstep      4\nsaved by  2 ranks, P=2 G=2 O=2\n"));
  EXPECT_THAT(said.output, HasSubstr("holds     35,008 parameters, 70,036 elements of optimizer state\n"));
  EXPECT_THAT(said.output, HasSubstr("data      epoch 0, sample 32 of "));
  EXPECT_THAT(said.output, HasSubstr("  model/embedding.weight "));
  EXPECT_THAT(said.output, HasSubstr("  random/1/cpu "));
}

TEST_F(CheckpointVerbs, InspectListsSeveral) {
  for (const std::string& folder : {job_->path("run"), job_->path("run/checkpoints")}) {
    const Said said = say({"inspect", folder});
    EXPECT_EQ(said.code, 0) << said.errors;
    EXPECT_THAT(said.output, AllOf(HasSubstr(step(2) + "      2 "), HasSubstr(step(4) + "      4 ")));
  }
}

TEST_F(CheckpointVerbs, InspectSpeaksJson) {
  const Json one = Json::parse(say({"inspect", step(2), "--json"}).output);
  EXPECT_EQ(one["step"], 2);
  EXPECT_EQ(one["layout"], (Json{{"ranks", 2}, {"parameters", 2}, {"gradients", 2}, {"optimizer", 2}, {"tensor", 1}}));
  EXPECT_EQ(one["training"]["config"]["model"]["dimension"], 32);
  uint64_t elements = 0;
  for (const Json& tensor : one["tensors"]) {
    if (tensor["name"].get<std::string>().starts_with("model/")) elements += tensor["bytes"].get<uint64_t>() / 4;
  }
  EXPECT_EQ(elements, 35008u);
  EXPECT_EQ(Json::parse(say({"inspect", job_->path("run"), "--json"}).output).size(), 2u);
  EXPECT_EQ(Json::parse(say({"inspect", step(2), "--config"}).output)["train"]["steps"], 4);
}

TEST_F(CheckpointVerbs, VerifyReadsEveryByte) {
  const Said said = say({"verify", job_->path("run")});
  EXPECT_EQ(said.code, 0) << said.errors;
  EXPECT_THAT(said.output, HasSubstr(step(2) + ": good, 3 files, "));
  EXPECT_THAT(said.output, HasSubstr(step(4) + ": good, 3 files, "));
  EXPECT_EQ(say({"verify", "--quiet", step(4)}).output, "");
}

TEST_F(CheckpointVerbs, VerifyNamesFileTensorAndOffsetOfEachFault) {
  const std::string run = copy();
  job_->damage(run, 4, "rank-0.safetensors");
  job_->damage(run, 4, "rank-1.safetensors");
  os::files().remove(step(2, run) + "/rank-1.safetensors");
  const Said said = say({"verify", job_->path(run)});
  EXPECT_EQ(said.code, 1);
  for (const char* file : {"rank-0", "rank-1"}) {
    EXPECT_THAT(said.output, HasSubstr(cat(step(4, run), "/", file, ".safetensors, tensor \"")));
  }
  EXPECT_THAT(said.output, AllOf(HasSubstr("\", byte 0: block 0"), HasSubstr(step(4, run) + ": 2 faults, 3 files")));
  EXPECT_THAT(said.output, HasSubstr(step(2, run) + "/rank-1.safetensors: "));
  EXPECT_THAT(said.output, HasSubstr(step(2, run) + ": 1 faults"));
}

TEST_F(CheckpointVerbs, ADamagedManifestIsNamedByBoth) {
  const std::string run = copy();
  job_->damage(run, 4, "manifest.json");
  for (const char* verb : {"inspect", "verify"}) {
    const Said said = say({verb, step(4, run)});
    EXPECT_EQ(said.code, 1);
    EXPECT_THAT(said.output + said.errors, HasSubstr(step(4, run) + "/manifest.json"));
  }
  const Said list = say({"inspect", job_->path(run)});
  EXPECT_EQ(list.code, 1);
  EXPECT_THAT(list.output, AllOf(HasSubstr(step(2, run) + "   "), HasSubstr("manifest.json")));
}

TEST_F(CheckpointVerbs, ConvertGoesToHuggingFaceAndBack) {
  os::files().write(job_->path("names.json"), R"({
    // stars stand for the number of the block
    "blocks.*.attention.query.weight": "model.layers.*.self_attn.q_proj.weight",
    "embedding.weight": "model.embed_tokens.weight"})");
  const std::string names = job_->path("names.json");
  const Said there = say({"convert", step(4), job_->path("weights"), "--names", names});
  ASSERT_EQ(there.code, 0) << there.errors;
  EXPECT_THAT(there.output, StartsWith(job_->path("weights") + ": 1 file, "));
  const std::string file = os::files().read(job_->path("weights/model.safetensors"));
  EXPECT_THAT(file.substr(0, 4000), AllOf(HasSubstr("\"model.layers.1.self_attn.q_proj.weight\""),
                                          HasSubstr("\"model.embed_tokens.weight\""), HasSubstr("\"norm.weight\"")));
  EXPECT_THAT(say({"convert", step(4), job_->path("weights")}).errors, HasSubstr("weights"))
      << "nothing is overwritten";

  const Said back = say({"convert", job_->path("weights/model.safetensors"), job_->path("back"), "--names", names});
  ASSERT_EQ(back.code, 0) << back.errors;
  const auto original = checkpoint::Checkpoint::open(step(4));
  const auto returned = checkpoint::Checkpoint::open(job_->path("back/step-0"));
  size_t compared = 0;
  for (const auto& tensor : original.manifest().tensors) {
    if (!tensor.name.starts_with("model/")) continue;
    EXPECT_TRUE(original.read(tensor.name) == returned.read(tensor.name)) << tensor.name;
    ++compared;
  }
  EXPECT_EQ(compared, returned.manifest().tensors.size());

  const std::string trained = job_->run(
      "fine-tuned", {"--resume", job_->path("back"), "--set", "train.steps=1", "optimizer.lr=0", "model.dropout=0"});
  EXPECT_THAT(trained, HasSubstr("resumed at step 0 from " + job_->path("back/step-0")));
}

TEST_F(CheckpointVerbs, ConvertWritesTheTypeAndTheFilesThatAreAskedFor) {
  const Said said = say({"convert", job_->path("run"), job_->path("half"), "--dtype", "bf16", "--file-size", "40KB"});
  ASSERT_EQ(said.code, 0) << said.errors;
  EXPECT_TRUE(os::files().exists(job_->path("half/model.safetensors.index.json")));
  EXPECT_THAT(os::files().read(job_->path("half/model-00001-of-00002.safetensors")).substr(0, 3000),
              HasSubstr("\"BF16\""));
  const Said wrong = say({"convert", job_->path("half"), job_->path("no"), "--dtype", "fp32"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.errors, HasSubstr("--dtype: is for weights that are written"));
}

TEST_F(CheckpointVerbs, WhatIsNotThereIsAnErrorThatSaysSo) {
  for (const char* verb : {"inspect", "verify"}) {
    EXPECT_EQ(say({verb, "/nowhere"}).code, 2);
    const Said said = say({verb, testing::TempDir()});
    EXPECT_EQ(said.code, 1);
    EXPECT_THAT(said.errors, HasSubstr("is no checkpoint, and there are none in it"));
  }
  EXPECT_EQ(say({"convert", "/nowhere", job_->path("x")}).code, 2);
  EXPECT_THAT(say({"convert", job_->folder(), job_->path("x")}).errors, HasSubstr("safetensors"));
  os::files().write(job_->path("bad.json"), "[1]");
  const Said said = say({"convert", step(4), job_->path("x"), "--names", job_->path("bad.json")});
  EXPECT_EQ(said.code, 2);
  EXPECT_THAT(said.errors, HasSubstr("bad.json: a name map is an object of strings"));
}

}  // namespace
}  // namespace tesserae
