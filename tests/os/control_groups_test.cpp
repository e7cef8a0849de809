#include "tesserae/os/control_groups.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/os/host.h"

namespace tesserae::os {
namespace {

class ControlGroups : public ::testing::Test {
 protected:
  ControlGroups() { std::filesystem::create_directories(folder_); }
  ~ControlGroups() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& file, const std::string& text) { std::ofstream(folder_ / file) << text << "\n"; }

  const Path folder_ = Path(::testing::TempDir()) / cat("control-groups-", ::getpid());
};

TEST_F(ControlGroups, SayOfHowManyProcessorsTheTimeIs) {
  EXPECT_EQ(processor_quota({folder_, true}), std::nullopt) << "no such files";
  EXPECT_EQ(processor_quota({folder_, false}), std::nullopt);
  write("cpu.max", "max 100000");
  EXPECT_EQ(processor_quota({folder_, true}), std::nullopt);
  write("cpu.max", "150000 100000");
  EXPECT_EQ(processor_quota({folder_, true}), 1.5);
  write("cpu.cfs_period_us", "50000");
  write("cpu.cfs_quota_us", "-1");
  EXPECT_EQ(processor_quota({folder_, false}), std::nullopt);
  write("cpu.cfs_quota_us", "400000");
  EXPECT_EQ(processor_quota({folder_, false}), 8);
}

TEST_F(ControlGroups, OfThisProcessAreThoseAroundItsOwn) {
  for (const std::string controller : {"memory", "cpu"}) {
    for (const ControlGroup& group : control_groups(controller)) {
      EXPECT_EQ(group.folder.native().find("/sys/fs/cgroup"), 0U) << group.folder;
      if (const auto quota = processor_quota(group)) EXPECT_LE(processors(), *quota + 1);
    }
  }
}

}  // namespace
}  // namespace tesserae::os
