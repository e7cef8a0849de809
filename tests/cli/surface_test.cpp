#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
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
  EXPECT_THAT(entries(help({})), ElementsAre("-h,--help", "--version", "train", "dial", "config", "inspect", "verify",
                                             "plan", "convert", "doctor"));
}

TEST(Surface, Train) {
  EXPECT_THAT(entries(help({"train"})),
              ElementsAre("CONFIG", "-h,--help", "--nproc", "--set", "--resume", "--dry-run"));
}

TEST(Surface, Doctor) {
  EXPECT_THAT(entries(help({"doctor"})), ElementsAre("-h,--help", "--nproc", "--json", "--mib", "--deadline"));
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

TEST(Surface, Plan) {
  EXPECT_THAT(entries(help({"plan"})),
              ElementsAre("-h,--help", "--top", "--all", "--json", "--model", "--parameters", "--layers", "--dimension",
                          "--heads", "--kv-heads", "--vocabulary", "--tied", "--batch", "--sequence", "--context",
                          "--micro-batch", "--dtype", "--reduce", "--optimizer", "--accumulation", "--keep-activations",
                          "--keep-gathered", "--no-sequence-parallel", "--devices", "--per-host", "--memory",
                          "--headroom", "--inside-gbps", "--between-gbps", "--tflops"));
}

TEST(Surface, PlanComputes) {
  const std::vector<std::string> model = {"--parameters", "7e9", "--layers", "32", "--dimension", "4096"};
  auto plan = [&](std::vector<std::string> arguments) {
    std::vector<std::string> all = {TESSERAE_PROGRAM, "plan"};
    all.insert(all.end(), model.begin(), model.end());
    all.insert(all.end(), arguments.begin(), arguments.end());
    return all;
  };
  Program fits(plan({"--memory", "80GB", "--json", "--all"}));
  EXPECT_TRUE(fits.finish()->success());
  const auto table = nlohmann::json::parse(fits.output);
  EXPECT_EQ(table["cluster"]["memory"], 80e9);
  EXPECT_NEAR(table["model"]["parameters"].get<double>(), 7e9, 0.1e9);
  EXPECT_EQ(table["layouts"].size(), table["layouts_total"]);
  EXPECT_TRUE(table["layouts"][0]["fits"]);
  Program small(plan({"--memory", "1e9"}));
  EXPECT_EQ(small.finish()->code, 1);
  EXPECT_THAT(small.output, HasSubstr("layouts   0 of"));
  Program none({TESSERAE_PROGRAM, "plan", "--parameters", "7e9"});
  EXPECT_EQ(none.finish()->code, 2);
}

TEST(Surface, HelpNamesTheExitStatuses) {
  EXPECT_THAT(help({}),
              HasSubstr("Exit status: 0 done; 1 failed; 2 the command line or the configuration cannot work"));
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
