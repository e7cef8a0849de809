#include "tesserae/config/sagemaker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>

#include "tesserae/os/files.h"

namespace tesserae::config {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Environment = std::map<std::string, std::string>;

mesh::Lookup lookup(const Environment& environment) {
  return [environment](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
}

/// A configuration beside what the container of a job has mounted.
class SageMakerJob : public ::testing::Test {
 protected:
  SageMakerJob() {
    os::files().make_directories(base_ + "/input/config");
    os::files().make_directories(base_ + "/input/data/train");
    write("/job.json", R"({"data": {"path": "text"}, "train": {"steps": 3}})");
  }
  ~SageMakerJob() override { os::files().remove_all(base_); }

  void write(const std::string& name, const std::string& text) { os::files().write(base_ + name, text); }

  Config load(const Environment& changes = {}, const std::vector<std::string>& assignments = {}) const {
    Environment environment = job_;
    for (const auto& [name, value] : changes) environment[name] = value;
    return load_train_config(base_ + "/job.json", assignments, lookup(environment));
  }
  std::string error(const Environment& changes, const std::vector<std::string>& assignments = {}) const {
    try {
      load(changes, assignments);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  }

  const std::string base_ = ::testing::TempDir() + "/tesserae-sagemaker-" + std::to_string(::getpid());
  const Environment job_{{"SM_HOSTS", R"(["algo-1"])"},  {"SM_CURRENT_HOST", "algo-1"},
                         {"SM_MODEL_DIR", "/m"},         {"SM_OUTPUT_DATA_DIR", "/out"},
                         {"SAGEMAKER_BASE_DIR", base_},  {"SM_CHANNEL_TRAIN", "/data/train"},
                         {"SM_CHANNELS", R"(["train"])"}};
};

TEST_F(SageMakerJob, FoldersAreThoseThatOutliveTheJob) {
  const Config config = load();
  EXPECT_EQ(config.run.folder, "/out/job");
  EXPECT_EQ(config.run.weights_folder, "/m");
  EXPECT_EQ(config.checkpoint.folder, base_ + "/checkpoints");
  EXPECT_EQ(config.train.steps, 3);
  const Config elsewhere = load_train_config(base_ + "/job.json", {}, lookup({}));
  EXPECT_EQ(elsewhere.run.folder, "runs/job");
  EXPECT_FALSE(elsewhere.run.weights_folder || elsewhere.checkpoint.folder);
}

TEST_F(SageMakerJob, TheFileIsStrongerThanFoldersAndHyperparametersThanTheFile) {
  write("/job.json", R"({"data": {"path": "text"}, "train": {"steps": 3}, "run": {"folder": "mine"}})");
  const Environment hyperparameters{{"SM_HPS", R"({"train.steps": 7, "optimizer.name": "sgd", "hybrid_shard_degree": 4,
    "sagemaker_program": "train.sh", "_tuning_objective_metric": "loss"})"}};
  const Config config = load(hyperparameters);
  EXPECT_EQ(config.run.folder, "mine");
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.optimizer.name, "sgd");
  EXPECT_EQ(config.sharding.hybrid_shard_degree, 4);
  EXPECT_EQ(load(hyperparameters, {"train.steps=9"}).train.steps, 9) << "--set is stronger still";
}

TEST_F(SageMakerJob, ModelparallelParametersOfTheEstimator) {
  const char* parameters = R"({"hybrid_shard_degree": 2, "random_seed": 7})";
  for (const Environment& given :
       std::initializer_list<Environment>{{{"SM_HP_MP_PARAMETERS", parameters}},
                                          {{"SM_HPS", Json{{"mp_parameters", Json::parse(parameters)}}.dump()}},
                                          {{"SM_HPS", Json{{"mp_parameters", parameters}}.dump()}},  // encoded twice
                                          {{"SM_HP_MP_PARAMETERS", Json(parameters).dump()}}}) {
    EXPECT_EQ(load(given).sharding.hybrid_shard_degree, 2);
    EXPECT_EQ(load(given).run.seed, 7u);
    EXPECT_EQ(sagemaker_parameters(lookup(given)), Json::parse(parameters));
  }
  EXPECT_FALSE(sagemaker_parameters(lookup(job_)));
}

TEST_F(SageMakerJob, ChannelsAreFolders) {
  write("/job.json", R"({"data": {"path": ["channel:train", "channel:train/more/a.txt", "text"]}})");
  const Config config = load({}, {"checkpoint.folder=channel:train/checkpoints"});
  EXPECT_THAT(config.data.path, ElementsAre("/data/train", "/data/train/more/a.txt", "text"));
  EXPECT_EQ(config.checkpoint.folder, "/data/train/checkpoints");
}

TEST_F(SageMakerJob, ErrorsSayWhatToChange) {
  EXPECT_THAT(error({{"SM_HPS", R"({"train.stpes": 7})"}}),
              AllOf(HasSubstr("train.stpes: is a hyperparameter"), HasSubstr("did you mean train.steps?")));
  EXPECT_THAT(error({{"SM_HPS", "steps=7"}}), HasSubstr("SM_HPS is not a JSON object but steps=7"));
  EXPECT_THAT(error({{"SM_HP_MP_PARAMETERS", R"({"partitions": 2})"}}),
              AllOf(HasSubstr("partitions: unknown key"), HasSubstr("SM_HP_MP_PARAMETERS"), HasSubstr("SMP v2")));
  EXPECT_THAT(error({}, {"data.path=channel:test"}),
              AllOf(HasSubstr("data.path"), HasSubstr("SM_CHANNEL_TEST is not set"), HasSubstr(R"(["train"])")));
  EXPECT_THROW(load_train_config(base_ + "/job.json", {"data.path=channel:test"}, lookup({})), ConfigError);
  const Environment two{{"SM_HOSTS", R"(["algo-1","algo-2"])"}};
  EXPECT_FALSE(load(two).checkpoint.enabled()) << "hosts do not share /opt/ml/checkpoints";
  EXPECT_THAT(error(two, {"checkpoint.every_steps=5"}),
              AllOf(HasSubstr("checkpoint.folder"), HasSubstr("2 hosts"), HasSubstr("channel:NAME")));
  EXPECT_EQ(load(two, {"checkpoint.folder=/fsx"}).checkpoint.folder, "/fsx");
}

TEST_F(SageMakerJob, WithoutTheToolkitWhatIsMountedSaysTheSame) {
  write("/input/config/resourceconfig.json", R"({"current_host": "algo-1", "hosts": ["algo-1"]})");
  write("/input/config/hyperparameters.json",
        R"({"train.steps": "11", "optimizer.name": "sgd", "mp_parameters": "{\"hybrid_shard_degree\": 2}"})");
  write("/job.json", R"({"data": {"path": "channel:train"}})");
  const mesh::Lookup environment = sagemaker_environment(lookup({{"SAGEMAKER_BASE_DIR", base_}}));
  const Config config = load_train_config(base_ + "/job.json", {}, environment);
  EXPECT_EQ(config.train.steps, 11);
  EXPECT_EQ(config.optimizer.name, "sgd");
  EXPECT_EQ(config.sharding.hybrid_shard_degree, 2);
  EXPECT_THAT(config.data.path, ElementsAre(base_ + "/input/data/train"));
  EXPECT_EQ(config.run.folder, base_ + "/output/data/job");
  EXPECT_EQ(config.run.weights_folder, base_ + "/model");
  EXPECT_EQ(config.checkpoint.folder, base_ + "/checkpoints");
}

TEST_F(SageMakerJob, AFileThatIsNoJsonIsNamed) {
  write("/input/config/resourceconfig.json", "hosts");
  try {
    sagemaker_environment(lookup({{"SAGEMAKER_BASE_DIR", base_}}));
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("resourceconfig.json:1:1: no valid JSON"));
  }
}

}  // namespace
}  // namespace tesserae::config
