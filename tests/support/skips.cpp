// Where CI=true a test that is skipped has failed, unless it is listed here: a skip that nobody reads says that
// something was tested which was not. In every test program (cmake/Layers.cmake).

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

namespace tesserae::testing {
namespace {

/// By name: why a machine of CI may be without what it needs.
const std::map<std::string, std::string>& permitted_skips() {
  static const std::map<std::string, std::string> list{
      {"Memory.FreedMemoryIsKeptOnDemandAndGivenBackOnDemand", "sanitizers bring a malloc of their own"},
      {"SharedMemoryTest.AFullFileSystemIsAnErrorNotACrash", "a container's /dev/shm may have no limit"},
      {"Fault.ContainersOfOneHostAndNameAreNotTakenForDead", "a sandbox may not permit namespaces"},
      {"ProcessWatch.ManyAreWaitedForTogether", "a sandbox's kernel may have no pidfd"},
  };
  return list;
}

class FailSkips : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& test) override {
    if (!test.result()->Skipped()) return;
    const std::string name = std::string(test.test_suite_name()) + "." + test.name();
    if (!permitted_skips().contains(name)) {
      ADD_FAILURE() << name << " was skipped, which no list permits in CI (tests/support/skips.cpp)";
    }
  }
};

const bool listens = [] {
  const char* ci = std::getenv("CI");
  if (ci != nullptr && std::string(ci) == "true") {
    ::testing::UnitTest::GetInstance()->listeners().Append(new FailSkips);  // owned by the list
  }
  return true;
}();

}  // namespace
}  // namespace tesserae::testing
