#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "tests/train/run_program.h"

// The names that scripts of users rely on. A change here is a change for them: say so in the release notes.

namespace tesserae {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

std::string help(std::vector<std::string> verb) {
  verb.insert(verb.begin(), TESSERAE_PROGRAM);
  verb.push_back("--help");
  Program program(verb);
  EXPECT_TRUE(program.finish()->success());
  return program.output;
}

/// The first word of each entry of a help text: options, verbs and positional arguments in order.
std::vector<std::string> entries(const std::string& text) {
  std::vector<std::string> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.size() < 3 || !line.starts_with("  ") || line[2] == ' ') continue;
    found.push_back(line.substr(2, line.find(' ', 2) - 2));
  }
  return found;
}

TEST(Surface, Program) {
  EXPECT_THAT(entries(help({})),
              ElementsAre("-h,--help", "--version", "train", "dial", "config", "inspect", "verify", "convert"));
}

TEST(Surface, Train) {
  EXPECT_THAT(entries(help({"train"})),
              ElementsAre("CONFIG", "-h,--help", "--nproc", "--set", "--resume", "--dry-run"));
}

TEST(Surface, Dial) {
  EXPECT_THAT(entries(help({"dial"})),
              ElementsAre("RUN_DIR", "-h,--help", "--degree", "--degrees", "--auto", "--show", "--wait"));
}

TEST(Surface, Config) {
  EXPECT_THAT(entries(help({"config"})), ElementsAre("KEY", "-h,--help", "--markdown", "--schema"));
}

TEST(Surface, Checkpoints) {
  EXPECT_THAT(entries(help({"inspect"})), ElementsAre("DIR", "-h,--help", "--json", "--config"));
  EXPECT_THAT(entries(help({"verify"})), ElementsAre("DIR", "-h,--help", "-q,--quiet"));
  EXPECT_THAT(entries(help({"convert"})), ElementsAre("FROM", "TO", "-h,--help", "--dtype", "--names", "--file-size"));
}

TEST(Surface, HelpNamesTheExitStatuses) {
  EXPECT_THAT(help({}),
              HasSubstr("Exit status: 0 done; 1 failed; 2 the command line or the configuration can not work"));
}

TEST(Surface, Version) {
  Program program({TESSERAE_PROGRAM, "--version"});
  EXPECT_TRUE(program.finish()->success());
  EXPECT_THAT(program.output, testing::MatchesRegex("tesserae [0-9.]+ \\(torch [0-9.]+.*\\)\n"));
}

TEST(Surface, ConfigExplainsOneSection) {
  Program program({TESSERAE_PROGRAM, "config", "train.steps"});
  EXPECT_TRUE(program.finish()->success());
  EXPECT_EQ(program.output, "train.steps = 100\n    an integer.\n    Optimizer steps.\n");
}

}  // namespace
}  // namespace tesserae
