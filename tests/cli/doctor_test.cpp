#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tesserae/config/json.h"
#include "tesserae/os/port.h"
#include "tests/train/run_program.h"

// `tesserae doctor` on this machine, as one process, as several, and as ranks that do not meet.

namespace tesserae {
namespace {

using config::Json;
using testing::Contains;
using testing::HasSubstr;

struct Diagnosis {
  int code = 0;
  std::string output, errors;
  Json json() const { return Json::parse(output); }
};

Diagnosis diagnose(std::vector<std::string> arguments, std::map<std::string, std::string> environment = {}) {
  arguments.insert(arguments.begin(), {TESSERAE_PROGRAM, "doctor"});
  environment.emplace("OMP_NUM_THREADS", "1");
  Program program(arguments, environment);
  const auto exit = program.finish();
  return {exit ? exit->code : -1, program.output, program.errors};
}

std::vector<std::string> subjects(const Json& rank) {
  std::vector<std::string> found;
  for (const Json& finding : rank.at("findings")) found.push_back(finding.at("subject"));
  return found;
}

TEST(DoctorProgram, OneProcessLooksAtItsMachine) {
  const Diagnosis said = diagnose({"--json"});
  EXPECT_EQ(said.code, 0) << said.output << said.errors;
  const Json json = said.json();
  ASSERT_EQ(json.at("ranks").size(), 1u);
  for (const char* subject : {"launcher", "system", "threads", "shared memory", "open files", "clock", "torch"}) {
    EXPECT_THAT(subjects(json.at("ranks")[0]), Contains(subject));
  }
  EXPECT_THAT(diagnose({}).output, HasSubstr("launcher         none: one process"));
}

TEST(DoctorProgram, RanksMeetAndMeasure) {
  const Diagnosis said = diagnose({"--nproc", "3", "--mib", "1", "--json"});
  EXPECT_EQ(said.code, 0) << said.output << said.errors;
  const Json json = said.json();
  ASSERT_EQ(json.at("ranks").size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(json.at("ranks")[rank].at("rank"), rank);
    EXPECT_THAT(subjects(json.at("ranks")[rank]), Contains("within hosts"));
  }
  EXPECT_THAT(diagnose({"--nproc", "2", "--mib", "1"}).output, HasSubstr("2 ranks on 1 host met"));
}

TEST(DoctorProgram, VariablesThatContradictEachOtherAreWrong) {
  const Diagnosis said =
      diagnose({}, {{"RANK", "5"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}});
  EXPECT_EQ(said.code, 1);
  EXPECT_THAT(said.output, HasSubstr("WRONG    launcher"));
  EXPECT_THAT(said.output, HasSubstr("RANK=5"));
}

TEST(DoctorProgram, ARankThatDoesNotComeIsNamed) {
  const Diagnosis said = diagnose({"--deadline", "2"}, {{"RANK", "0"},
                                                        {"WORLD_SIZE", "2"},
                                                        {"LOCAL_RANK", "0"},
                                                        {"LOCAL_WORLD_SIZE", "2"},
                                                        {"MASTER_ADDR", "127.0.0.1"},
                                                        {"MASTER_PORT", std::to_string(os::free_port())}});
  EXPECT_EQ(said.code, 1);
  EXPECT_THAT(said.output, HasSubstr("WRONG    ranks"));
  EXPECT_THAT(said.output, HasSubstr("firewalls"));
}

}  // namespace
}  // namespace tesserae
