// A test that is skipped fails its program where CI=true, and only there.

#include <gtest/gtest.h>

#include <string>

#include "tesserae/os/clock.h"
#include "tesserae/os/process.h"
#include "tesserae/os/program.h"

namespace tesserae::testing {
namespace {

TEST(Skips, DISABLED_AreToldFromPasses) {
  GTEST_SKIP() << "as it should";
}

int status_of_a_skip(const std::string& ci) {
  auto child = os::Process::spawn({
      .arguments = {os::program_path(), "--gtest_filter=Skips.DISABLED_AreToldFromPasses",
                    "--gtest_also_run_disabled_tests"},
      .environment = {{"CI", ci}},
      .die_with_parent = true,
  });
  const auto end = child.wait(os::Deadline(std::chrono::seconds(60)));
  return end ? end->code : -1;
}

TEST(Skips, FailInCi) {
  EXPECT_EQ(status_of_a_skip("true"), 1);
  EXPECT_EQ(status_of_a_skip("false"), 0);
}

}  // namespace
}  // namespace tesserae::testing
