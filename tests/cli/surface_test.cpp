#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tesserae/os/files.h"
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
              ElementsAre("-h,--help", "--version", "train", "run", "watch", "dial", "scale", "stacks", "trace",
                          "config", "inspect", "verify", "plan", "probe", "convert", "tokenize", "doctor"));
}

TEST(Surface, Train) {
  EXPECT_THAT(entries(help({"train"})),
              ElementsAre("CONFIG", "-h,--help", "--nproc", "--set", "--resume", "--dry-run"));
}

TEST(Surface, Run) {
  EXPECT_THAT(entries(help({"run"})), ElementsAre("-h,--help", "--nproc", "--replacements", "--spares", "--min-ranks",
                                                  "--max-restarts", "--hosts", "--host", "--address", "--port",
                                                  "--shared", "--host-deadline", "--cold", "--grace", "--early-exit"));
}

TEST(Surface, Doctor) {
  EXPECT_THAT(entries(help({"doctor"})), ElementsAre("-h,--help", "--nproc", "--json", "--mib", "--deadline"));
}

TEST(Surface, Probe) {
  EXPECT_THAT(entries(help({"probe"})),
              ElementsAre("-h,--help", "--nproc", "--out", "--name", "--dtype", "--backend", "--window", "--deadline"));
}

TEST(Surface, Watch) {
  EXPECT_THAT(entries(help({"watch"})),
              ElementsAre("RUN_DIR", "-h,--help", "--port", "--host", "--token", "--allow-control"));
}

TEST(Surface, Dial) {
  EXPECT_THAT(entries(help({"dial"})), ElementsAre("RUN_DIR", "-h,--help", "--degree", "--degrees", "--expert",
                                                   "--offload", "--auto", "--show", "--wait"));
}

TEST(Surface, Scale) {
  EXPECT_THAT(entries(help({"scale"})), ElementsAre("RUN_DIR", "-h,--help", "--ranks", "--wait"));
}

TEST(Surface, AskingARun) {
  EXPECT_THAT(entries(help({"stacks"})), ElementsAre("RUN_DIR", "-h,--help", "--wait"));
  EXPECT_THAT(entries(help({"trace"})), ElementsAre("RUN_DIR", "-h,--help", "--steps", "--wait"));
}

TEST(Surface, Config) {
  EXPECT_THAT(entries(help({"config"})), ElementsAre("KEY", "-h,--help", "--markdown", "--schema"));
}

TEST(Surface, Checkpoints) {
  EXPECT_THAT(entries(help({"inspect"})), ElementsAre("PATH", "-h,--help", "--json", "--config"));
  EXPECT_THAT(entries(help({"verify"})), ElementsAre("PATH", "-h,--help", "-q,--quiet"));
  EXPECT_THAT(entries(help({"convert"})), ElementsAre("FROM", "TO", "-h,--help", "--dtype", "--names", "--file-size"));
}

TEST(Surface, Plan) {
  EXPECT_THAT(
      entries(help({"plan"})),
      ElementsAre("-h,--help", "--top", "--all", "--json", "--model", "--script", "--units", "--traced", "--parameters",
                  "--layers", "--dimension", "--heads", "--kv-heads", "--vocabulary", "--tied", "--batch", "--sequence",
                  "--context", "--expert", "--micro-batch", "--dtype", "--reduce", "--optimizer", "--accumulation",
                  "--keep-activations", "--keep-gathered", "--no-sequence-parallel", "--machine", "--devices",
                  "--per-host", "--memory", "--headroom", "--inside-gbps", "--between-gbps", "--tflops"));
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
  EXPECT_EQ(table["cluster"]["machine"]["memory"], 80e9);
  EXPECT_NEAR(table["model"]["parameters"].get<double>(), 7e9, 0.1e9);
  EXPECT_EQ(table["layouts"].size(), table["layouts_total"]);
  EXPECT_TRUE(table["layouts"][0]["fits"]);
  for (const auto& [asked, bytes] :
       {std::pair("1.5TB", 1.5e12), std::pair("0.5GiB", 0.5 * (1 << 30)), std::pair("2k", 2e3)}) {
    Program part(plan({"--memory", asked, "--json"}));
    part.finish();
    EXPECT_EQ(nlohmann::json::parse(part.output)["cluster"]["machine"]["memory"], bytes) << asked;
  }
  Program odd(plan({"--memory", "1.5 parsec"}));
  EXPECT_EQ(odd.finish()->code, 2);
  Program small(plan({"--memory", "1e9"}));
  EXPECT_EQ(small.finish()->code, 1);
  EXPECT_THAT(small.output, HasSubstr("layouts   0 of"));
  Program none({TESSERAE_PROGRAM, "plan", "--parameters", "7e9"});
  EXPECT_EQ(none.finish()->code, 2);
  Program unknown(plan({"--machine", "h1000"}));
  EXPECT_EQ(unknown.finish()->code, 2);
  EXPECT_THAT(unknown.errors, HasSubstr("there are a100, h100, h200, b200, trn2, and no such file"));
}

TEST(Surface, AProbeFeedsAPlan) {
  const std::string file = testing::TempDir() + "/tesserae-machine-" + std::to_string(::getpid()) + ".json";
  Program probe({TESSERAE_PROGRAM, "probe", "--nproc", "2", "--window", "0.001", "--name", "here", "--out", file},
                {{"CUDA_VISIBLE_DEVICES", ""}});
  EXPECT_TRUE(probe.wait_for("measuring products in fp32")) << probe.errors;
  // Copies of the one that started them, as the ranks of a job are: what is measured of a process is true of those.
  const std::string self = std::to_string(probe.process().id());
  std::istringstream children(os::files().read("/proc/" + self + "/task/" + self + "/children"));
  int ranks = 0;
  for (std::string child; children >> child; ++ranks) {
    EXPECT_EQ(os::files().read("/proc/" + child + "/cmdline"), os::files().read("/proc/" + self + "/cmdline"));
  }
  EXPECT_EQ(ranks, 2);
  EXPECT_TRUE(probe.finish()->success()) << probe.errors;
  const std::vector<std::string> command = {TESSERAE_PROGRAM, "plan", "--parameters", "2e6",  "--layers",   "2",
                                            "--dimension",    "128",  "--vocabulary", "1000", "--batch",    "8",
                                            "--sequence",     "64",   "--machine",    file,   "--headroom", "0"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), command.begin(), command.end());
    return more;
  };
  Program plan(with({"--dtype", "fp32"}));
  EXPECT_TRUE(plan.finish()->success()) << plan.errors;
  EXPECT_THAT(plan.output, HasSubstr("2 ranks, 2 a host, each host with"));
  Program several(with({"--dtype", "fp32", "--devices", "4"}));
  EXPECT_EQ(several.finish()->code, 2);
  EXPECT_THAT(several.errors, HasSubstr("probe it on two, or say how fast the network is"));
  EXPECT_THAT(plan.output, HasSubstr("here (measured)"));
  Program other(with({"--dtype", "bf16"}));
  EXPECT_EQ(other.finish()->code, 2);
  EXPECT_THAT(other.errors, HasSubstr("measure it: tesserae probe --dtype bf16"));
  std::filesystem::remove(file);
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
