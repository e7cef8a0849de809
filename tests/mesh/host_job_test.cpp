#include "tesserae/mesh/host_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/mesh/environment.h"

// Variables as SageMaker's training toolkit and Kubeflow's training operator set them.

namespace tesserae::mesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Reader = std::optional<HostJob> (*)(const Lookup&);

std::optional<HostJob> read(Reader reader, const Environment& environment) {
  return reader(lookup_in(environment));
}

std::string error_of(Reader reader, const Environment& environment) {
  try {
    read(reader, environment);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

const Environment sagemaker{
    {"SM_HOSTS", R"(["algo-1","algo-2"])"}, {"SM_CURRENT_HOST", "algo-2"}, {"SM_NUM_GPUS", "8"}};
const Environment pod{{"PET_NNODES", "3"},          {"PET_NODE_RANK", "2"},   {"PET_NPROC_PER_NODE", "4"},
                      {"MASTER_ADDR", "head-0"},    {"MASTER_PORT", "23456"}, {"PET_MASTER_ADDR", "head-0"},
                      {"PET_MASTER_PORT", "23456"}, {"WORLD_SIZE", "12"},     {"RANK", "2"}};

TEST(SageMaker, HostsAreNumberedAsTheyAreListed) {
  const HostJob job = read(read_sagemaker, sagemaker).value();
  EXPECT_EQ(job.platform, "sagemaker");
  EXPECT_EQ(job.hosts, 2);
  EXPECT_EQ(job.host, 1);
  EXPECT_EQ(job.ranks, 8);
  EXPECT_EQ(job.address, "algo-1");
  EXPECT_EQ(job.port, 7777) << "as under the training toolkit";
  EXPECT_FALSE(read(read_sagemaker, {}));
  EXPECT_EQ(read(read_sagemaker, with(sagemaker, {{"SM_NUM_GPUS", ""}}))->ranks, 0) << "nothing is said";
}

TEST(SageMaker, TheResourceConfigurationHasTheSame) {
  const HostJob job = read(read_sagemaker, {{"SM_RESOURCE_CONFIG", R"({"current_host": "b", "hosts": ["a", "b", "c"],
                                                       "instance_groups": [{"hosts": ["a", "b", "c"]}]})"}})
                          .value();
  EXPECT_EQ(job.hosts, 3);
  EXPECT_EQ(job.host, 1);
  EXPECT_EQ(job.address, "a");
}

TEST(SageMaker, WhereRanksMeetCanBeOverridden) {
  const Environment driver = with(sagemaker, {{"SM_MASTER_ADDR", "algo-9"}, {"SM_MASTER_PORT", "4000"}});
  EXPECT_EQ(read(read_sagemaker, driver)->address, "algo-9");
  EXPECT_EQ(read(read_sagemaker, driver)->port, 4000);
  const Environment both = with(driver, {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "5000"}});
  EXPECT_EQ(read(read_sagemaker, both)->address, "10.0.0.1");
  EXPECT_EQ(read(read_sagemaker, both)->port, 5000);
}

TEST(SageMaker, ErrorsNameTheVariable) {
  const auto error = [](const Environment& changes) { return error_of(read_sagemaker, with(sagemaker, changes)); };
  for (const char* wrong : {"algo-1,algo-2", "[]", "[1]", R"({"a": 1})", R"(["a", ""])"}) {
    EXPECT_THAT(error({{"SM_HOSTS", wrong}}), AllOf(HasSubstr(wrong), HasSubstr("is not a JSON list of names")))
        << wrong;
  }
  EXPECT_THAT(error({{"SM_HOSTS", R"(["a","b","a"])"}}), HasSubstr("names a twice"));
  EXPECT_THAT(error({{"SM_CURRENT_HOST", ""}}), HasSubstr("2 hosts, but SM_CURRENT_HOST is not set"));
  EXPECT_THAT(error({{"SM_CURRENT_HOST", "algo-3"}}),
              AllOf(HasSubstr("SM_CURRENT_HOST=algo-3"), HasSubstr(R"(["algo-1","algo-2"])")));
  EXPECT_THAT(error({{"SM_NUM_GPUS", "eight"}}), HasSubstr("SM_NUM_GPUS=eight is not a number"));
  EXPECT_THAT(error({{"SM_NUM_GPUS", "-1"}}), HasSubstr("SM_NUM_GPUS=-1 is negative"));
  EXPECT_THAT(error({{"MASTER_PORT", "70000"}}), HasSubstr("MASTER_PORT=70000 is no port"));
  EXPECT_THAT(error({{"SM_RESOURCE_CONFIG", "hosts"}}), HasSubstr("SM_RESOURCE_CONFIG=hosts is not a JSON object"));
  EXPECT_THAT(error({{"SM_RESOURCE_CONFIG", R"({"instance_groups": [{}, {}]})"}}),
              AllOf(HasSubstr("2 instance groups"), HasSubstr("torchrun")));
}

TEST(Pod, PodsAreHosts) {
  const HostJob job = read(read_pod, pod).value();
  EXPECT_EQ(job.platform, "kubernetes");
  EXPECT_EQ(job.hosts, 3);
  EXPECT_EQ(job.host, 2);
  EXPECT_EQ(job.ranks, 4);
  EXPECT_EQ(job.address, "head-0");
  EXPECT_EQ(job.port, 23456);
  EXPECT_EQ(read(read_pod, with(pod, {{"PET_NPROC_PER_NODE", "auto"}}))->ranks, 0) << "the operator's default";
  EXPECT_FALSE(read(read_pod, {}));
  EXPECT_EQ(read(read_pod, {{"PET_NNODES", "1"}})->hosts, 1) << "a job without workers needs no meeting place";
}

TEST(Pod, RanksOfTorchrunAreRanks) {
  EXPECT_FALSE(read(read_pod, with(pod, {{"LOCAL_RANK", "0"}})));
}

TEST(Pod, ErrorsNameTheVariable) {
  const auto error = [](const Environment& changes) { return error_of(read_pod, with(pod, changes)); };
  EXPECT_THAT(error({{"PET_NNODES", "1:4"}}), AllOf(HasSubstr("PET_NNODES=1:4"), HasSubstr("torchrun")));
  EXPECT_THAT(error({{"PET_NODE_RANK", ""}}), HasSubstr("PET_NODE_RANK is not set"));
  EXPECT_THAT(error({{"PET_NODE_RANK", "3"}}), HasSubstr("PET_NODE_RANK=3 contradicts PET_NNODES=3"));
  EXPECT_THAT(error({{"PET_NNODES", "two"}}), HasSubstr("PET_NNODES=two is not a number"));
  EXPECT_THAT(error({{"MASTER_ADDR", ""}, {"PET_MASTER_ADDR", ""}}), HasSubstr("set MASTER_ADDR"));
  EXPECT_THAT(error({{"MASTER_PORT", "0"}}), HasSubstr("MASTER_PORT=0 is no port"));
}

TEST(Pod, ARankWithoutTorchrunIsToldWhatItsNumberCounts) {
  const auto launch = [](const Lookup& lookup) {
    read_launch(lookup);
    return std::optional<HostJob>();
  };
  EXPECT_THAT(error_of(launch, pod), AllOf(HasSubstr("RANK=2 counts pods"), HasSubstr("start the ranks by torchrun")));
}

}  // namespace
}  // namespace tesserae::mesh
