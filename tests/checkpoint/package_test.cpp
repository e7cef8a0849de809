#include <gmock/gmock.h>

#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/safetensors.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/process.h"
#include "tests/checkpoint/header_cases.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/os/scratch.h"

namespace tesserae::checkpoint {
namespace {

/// Why we refuse a file; empty: we take it.
std::string refusal(const std::string& bytes) {
  testing::MemoryFiles memory;
  memory.write("/x", bytes);
  const auto file = memory.open("/x");
  try {
    read_safetensors_header(*file, bytes.size(), "x");
    return {};
  } catch (const Damaged& damaged) {
    return damaged.fault().what;
  }
}

class Package : public os::Scratch {
 protected:
  /// The package's verdicts; nothing if it is not installed.
  std::optional<std::vector<bool>> verdicts(const std::vector<std::string>& files) {
    const os::Path cases = folder_ / "cases";
    std::string all;
    for (const std::string& file : files) {
      for (int shift = 0; shift < 64; shift += 8) all.push_back(static_cast<char>(uint64_t{file.size()} >> shift));
      all += file;
    }
    os::files().write(cases, all);
    os::Pipe pipe = os::make_pipe();
    os::Process python =
        os::Process::spawn({.arguments = {TESSERAE_PYTHON, TESSERAE_VERDICTS, cases}, .output = pipe.write.get()});
    pipe.write.reset();
    std::string printed;
    for (std::string some = os::read_some(pipe.read.get()); !some.empty(); some = os::read_some(pipe.read.get()))
      printed += some;
    const auto exit = python.wait(os::Deadline(std::chrono::seconds(60)));
    if (exit && exit->code == 3) return std::nullopt;
    EXPECT_TRUE(exit && exit->success());
    std::vector<bool> verdicts;
    for (const char c : printed) {
      if (c != '\n') verdicts.push_back(c == '1');
    }
    EXPECT_EQ(verdicts.size(), files.size());
    return verdicts;
  }
};

TEST_F(Package, RecordedVerdictsAreThePackagesOwn) {
  const auto cases = testing::header_cases();
  std::vector<std::string> files;
  for (const auto& header : cases) files.push_back(header.file);
  const auto found = verdicts(files);
  if (!found)
    GTEST_SKIP() << "the Python package safetensors is not installed: its recorded verdicts are tested instead";
  for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ((*found)[i], cases[i].package_takes) << cases[i].name;
}

// Over files changed at random: we never take what the package refuses, and refuse what it takes for a documented
// reason only.
TEST_F(Package, DiffersInTheDocumentedWaysOnly) {
  const auto seeds = testing::seed_files();
  std::vector<std::string> files;
  for (uint64_t seed = 0; seed < 20'000; ++seed) files.push_back(testing::mutated_file(seeds, seed));
  const auto found = verdicts(files);
  if (!found) GTEST_SKIP() << "the Python package safetensors is not installed: nothing to compare with";
  const std::vector<std::string> documented{
      "occurs twice",   "name is empty", "control character", "begins with a slash", "component \"..\"",
      "unknown key",    "found a list",  "found null",        "is too large",        "do not fit type and shape",
      "too many values"};
  int taken = 0, stricter = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string why = refusal(files[i]);
    if (why.empty()) {
      EXPECT_TRUE((*found)[i]) << "we took what the package refuses: " << ::testing::PrintToString(files[i]);
      ++taken;
    } else if ((*found)[i]) {
      ++stricter;
      EXPECT_TRUE(
          std::ranges::any_of(documented, [&](const auto& reason) { return why.find(reason) != std::string::npos; }))
          << why << " in " << ::testing::PrintToString(files[i]);
    }
  }
  EXPECT_GT(taken, 1000);
  EXPECT_GT(stricter, 20);
}

}  // namespace
}  // namespace tesserae::checkpoint
