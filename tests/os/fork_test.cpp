#include "tesserae/os/fork.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

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

}  // namespace
}  // namespace tesserae::os
