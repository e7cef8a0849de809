#include "tesserae/os/fork.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

namespace tesserae::os {
namespace {

TEST(ForkGuard, TellsAChildFromWhereItWasMade) {
  const ForkGuard made;
  EXPECT_FALSE(made.in_child());
  const pid_t child = ::fork();
  if (child == 0) {
    const ForkGuard made_here;
    const bool right = made.in_child() && !made_here.in_child();
    const pid_t grandchild = ::fork();
    if (grandchild == 0) ::_exit(made.in_child() && made_here.in_child() ? 0 : 1);
    int status = 0;
    ::waitpid(grandchild, &status, 0);
    ::_exit(right && status == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(made.in_child());
}

TEST(NoForkMeanwhile, AForkWaitsForItsEnd) {
  std::optional<NoForkMeanwhile> no_fork(std::in_place);
  std::atomic<bool> ended{false};
  int status = -1;
  std::thread forks([&] {
    const pid_t child = ::fork();
    if (child == 0) {
      const NoForkMeanwhile in_the_child;  // what the parent's thread held is free here
      ::_exit(ended ? 0 : 1);
    }
    ::waitpid(child, &status, 0);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ended = true;
  no_fork.reset();
  forks.join();
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace tesserae::os
