#include "tesserae/mesh/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/mesh/environment.h"

namespace tesserae::mesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Launch read(const Environment& environment) {
  return read_launch(lookup_in(environment));
}

std::string error_of(const Environment& environment) {
  try {
    read(environment);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

void expect_numbers(const Launch& launch, const std::string& launcher, int rank, int size, int local_rank,
                    int local_size) {
  EXPECT_EQ(launch.launcher, launcher);
  EXPECT_EQ(launch.rank, rank);
  EXPECT_EQ(launch.size, size);
  EXPECT_EQ(launch.local_rank, local_rank);
  EXPECT_EQ(launch.local_size, local_size);
}

const Environment torchrun{{"RANK", "5"},           {"WORLD_SIZE", "8"},
                           {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "4"},
                           {"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}};
const Environment slurm{{"SLURM_PROCID", "5"},
                        {"SLURM_NTASKS", "8"},
                        {"SLURM_LOCALID", "1"},
                        {"SLURM_NTASKS_PER_NODE", "4"},
                        {"SLURM_STEP_NODELIST", "node[03-04]"},
                        {"SLURM_JOB_ID", "4711"},
                        {"SLURM_STEP_ID", "0"}};
const Environment openmpi{{"OMPI_COMM_WORLD_RANK", "2"},
                          {"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                          {"OMPI_MCA_ess_base_jobid", "1234567"}};
const Environment mpich{
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}, {"MASTER_PORT", "4000"}};

TEST(Launch, WithoutALauncherThereIsOneProcess) {
  expect_numbers(read({}), "single", 0, 1, 0, 1);
  EXPECT_EQ(read({}).port, 0);
  expect_numbers(read({{"RANK", ""}, {"MASTER_ADDR", "elsewhere"}}), "single", 0, 1, 0, 1);
}

TEST(Launch, Torchrun) {
  const Launch launch = read(torchrun);
  expect_numbers(launch, "torchrun", 5, 8, 1, 4);
  EXPECT_EQ(launch.address, "head");
  EXPECT_EQ(launch.port, 29500);
  EXPECT_FALSE(launch.store_is_served);
  EXPECT_TRUE(read(with(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).store_is_served);
  EXPECT_FALSE(read(with(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).store_is_served);
}

TEST(Launch, TorchrunErrorsNameTheVariables) {
  for (const auto& [name, value] : torchrun) {
    if (name == "RANK") continue;
    EXPECT_THAT(error_of(with(torchrun, {{name, ""}})), HasSubstr(name + " is not set"));
  }
  EXPECT_THAT(error_of(with(torchrun, {{"RANK", ""}})), HasSubstr("RANK is not"));
  EXPECT_THAT(error_of(with(torchrun, {{"RANK", "8"}})), AllOf(HasSubstr("RANK=8"), HasSubstr("WORLD_SIZE=8")));
  EXPECT_THAT(error_of(with(torchrun, {{"RANK", "-1"}})), HasSubstr("RANK=-1"));
  EXPECT_THAT(error_of(with(torchrun, {{"RANK", "five"}})), HasSubstr("RANK=five is not a number"));
  EXPECT_THAT(error_of(with(torchrun, {{"RANK", "5 "}})), HasSubstr("is not a number"));
  EXPECT_THAT(error_of(with(torchrun, {{"WORLD_SIZE", "99999999999"}})), HasSubstr("WORLD_SIZE=99999999999"));
  EXPECT_THAT(error_of(with(torchrun, {{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE=0 is not positive"));
  EXPECT_THAT(error_of(with(torchrun, {{"LOCAL_RANK", "4"}})),
              AllOf(HasSubstr("LOCAL_RANK=4"), HasSubstr("LOCAL_WORLD_SIZE=4")));
  EXPECT_THAT(error_of(with(torchrun, {{"LOCAL_WORLD_SIZE", "16"}})),
              AllOf(HasSubstr("LOCAL_WORLD_SIZE=16"), HasSubstr("WORLD_SIZE=8")));
  EXPECT_THAT(error_of(with(torchrun, {{"MASTER_PORT", "65536"}})), HasSubstr("MASTER_PORT=65536"));
}

TEST(Launch, TorchrunInsideASlurmStepWins) {
  Environment both = slurm;
  both.insert(torchrun.begin(), torchrun.end());
  both["SLURM_NTASKS"] = "2";
  both["SLURM_PROCID"] = "1";
  expect_numbers(read(both), "torchrun", 5, 8, 1, 4);
}

TEST(Launch, Slurm) {
  const Launch launch = read(slurm);
  expect_numbers(launch, "slurm", 5, 8, 1, 4);
  EXPECT_EQ(launch.address, "node03");
  EXPECT_GE(launch.port, 15000);
  EXPECT_LT(launch.port, 30000);
  EXPECT_EQ(read(with(slurm, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}})).port, launch.port)
      << "all ranks derive the same port";
  EXPECT_NE(read(with(slurm, {{"SLURM_STEP_ID", "1"}})).port, launch.port) << "two steps of a job do not collide";
}

TEST(Launch, SlurmTellsTheLocalSizeInThreeWays) {
  const Environment silent = with(slurm, {{"SLURM_NTASKS_PER_NODE", ""}});
  const Environment uneven = with(silent, {{"SLURM_STEP_TASKS_PER_NODE", "4,3"}, {"SLURM_NTASKS", "7"}});
  EXPECT_EQ(read(with(silent, {{"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}})).local_size, 4);
  EXPECT_EQ(read(with(silent, {{"SLURM_TASKS_PER_NODE", "4(x2)"}})).local_size, 4);
  EXPECT_EQ(read(with(uneven, {{"SLURM_NODEID", "1"}})).local_size, 3);
  EXPECT_THAT(error_of(uneven), HasSubstr("SLURM_NTASKS_PER_NODE")) << "which of the two hosts this is, nothing says";
  EXPECT_THAT(error_of(with(uneven, {{"SLURM_NODEID", "2"}})), HasSubstr("SLURM_NODEID=2"));
  EXPECT_THAT(error_of(silent), HasSubstr("SLURM_STEP_TASKS_PER_NODE"));
  EXPECT_EQ(
      read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_LOCALID", "0"}, {"SLURM_STEPID", "0"}}).launcher,
      "slurm");
}

// There Slurm says, too, that this is task 0 of 4, though nobody starts the others.
TEST(Launch, TheShellsOfAJobScriptAndOfSallocAreNoRanks) {
  for (const char* step : {"", "4294967290", "4294967291"}) {
    const Environment shell = with(slurm, {{"SLURM_STEP_ID", step}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}});
    EXPECT_EQ(read(shell).size, 1) << step;
  }
}

TEST(Launch, SlurmRendezvousCanBeOverridden) {
  const Launch launch = read(with(slurm, {{"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "1234"}}));
  EXPECT_EQ(launch.address, "10.0.0.7");
  EXPECT_EQ(launch.port, 1234);
  EXPECT_EQ(read(with(slurm, {{"SLURM_STEP_NODELIST", ""}, {"SLURM_JOB_NODELIST", "a[7-8]"}})).address, "a7");
}

TEST(Launch, SlurmErrorsNameTheVariables) {
  EXPECT_THAT(error_of(with(slurm, {{"SLURM_NTASKS", ""}})), HasSubstr("SLURM_NTASKS is not set"));
  EXPECT_THAT(error_of(with(slurm, {{"SLURM_LOCALID", ""}})), HasSubstr("SLURM_LOCALID is not set"));
  EXPECT_THAT(error_of(with(slurm, {{"SLURM_PROCID", "8"}})),
              AllOf(HasSubstr("SLURM_PROCID=8"), HasSubstr("SLURM_NTASKS=8")));
  EXPECT_THAT(error_of(with(slurm, {{"SLURM_LOCALID", "4"}})),
              AllOf(HasSubstr("SLURM_LOCALID=4"), HasSubstr("SLURM_NTASKS_PER_NODE=4")));
  EXPECT_THAT(error_of(with(slurm, {{"WORLD_SIZE", "16"}})),
              AllOf(HasSubstr("WORLD_SIZE=16"), HasSubstr("SLURM_NTASKS=8"), HasSubstr("RANK")));
  EXPECT_THAT(error_of(with(slurm, {{"SLURM_STEP_NODELIST", ""}})), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(error_of(with(slurm, {{"SLURM_STEP_NODELIST", "node[03-"}})), HasSubstr("node[03-"));
  EXPECT_THAT(error_of(with(slurm, {{"SLURM_JOB_ID", ""}})),
              AllOf(HasSubstr("SLURM_JOB_ID"), HasSubstr("MASTER_PORT")));
}

TEST(Launch, OpenMpi) {
  const Launch launch = read(openmpi);
  expect_numbers(launch, "openmpi", 2, 4, 2, 4);
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_GE(launch.port, 15000);
  EXPECT_NE(read(with(openmpi, {{"PMIX_NAMESPACE", "prterun-host-77@1"}})).port, launch.port);
  EXPECT_EQ(read(with(openmpi, {{"MASTER_PORT", "77"}})).port, 77);
}

TEST(Launch, OpenMpiInsideASlurmAllocationWins) {
  Environment both = slurm;
  both.insert(openmpi.begin(), openmpi.end());
  expect_numbers(read(both), "openmpi", 2, 4, 2, 4);
}

TEST(Launch, OpenMpiErrorsSayWhatToSet) {
  const Environment two_hosts = with(openmpi, {{"OMPI_COMM_WORLD_SIZE", "8"}});
  EXPECT_THAT(error_of(two_hosts), AllOf(HasSubstr("several hosts"), HasSubstr("set MASTER_ADDR")));
  EXPECT_EQ(read(with(two_hosts, {{"MASTER_ADDR", "head"}})).address, "head");
  EXPECT_THAT(error_of(with(openmpi, {{"OMPI_MCA_ess_base_jobid", ""}})), HasSubstr("set MASTER_PORT"));
  EXPECT_THAT(error_of(with(openmpi, {{"OMPI_COMM_WORLD_RANK", ""}})), HasSubstr("OMPI_COMM_WORLD_RANK is not set"));
  EXPECT_THAT(error_of(with(openmpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "5"}})),
              HasSubstr("OMPI_COMM_WORLD_LOCAL_SIZE=5"));
}

TEST(Launch, Mpich) {
  expect_numbers(read(mpich), "mpich", 1, 2, 1, 2);
  EXPECT_EQ(read(mpich).address, "127.0.0.1");
  EXPECT_EQ(read(mpich).port, 4000);
  EXPECT_THAT(error_of(with(mpich, {{"MASTER_PORT", ""}})), HasSubstr("set MASTER_PORT"));
  EXPECT_THAT(error_of(with(mpich, {{"PMI_SIZE", "4"}})), HasSubstr("set MASTER_ADDR"));
  EXPECT_THAT(error_of(with(mpich, {{"MPI_LOCALRANKID", ""}})), HasSubstr("MPI_LOCALRANKID is not set"));
  EXPECT_THAT(error_of(with(mpich, {{"PMI_RANK", ""}})), HasSubstr("PMI_RANK is not set"));
  EXPECT_THAT(error_of({{"PMI_SIZE", "2"}}), HasSubstr("PMI_RANK is not"));
}

TEST(Launch, SlurmsOwnPmiIsSlurm) {
  expect_numbers(read(with(slurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}})), "slurm", 5, 8, 1, 4);
}

}  // namespace
}  // namespace tesserae::mesh
