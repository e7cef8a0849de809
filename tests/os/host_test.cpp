#include "tesserae/os/host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace tesserae::os {
namespace {

TEST(Host, HasTheNameOfTheSystem) {
  char name[256] = {};
  ASSERT_EQ(::gethostname(name, sizeof name - 1), 0);
  EXPECT_EQ(host_name(), name);
}

TEST(Host, IdentityTellsBootsAndProcessNamespacesApart) {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const auto processes = std::filesystem::read_symlink("/proc/self/ns/pid").native();
  ASSERT_NE(processes, "");
  EXPECT_EQ(host_identity(), host_name() + "/" + boot + "/" + processes);
}

TEST(Host, HasProcessors) {
  EXPECT_GE(processors(), 1);
}

}  // namespace
}  // namespace tesserae::os
