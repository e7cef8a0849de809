#include "tesserae/os/file_lock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "tests/os/scratch.h"

namespace tesserae::os {
namespace {

class FileLocks : public Scratch {
 protected:
  Path path_ = folder_ / "lock";
};

TEST_F(FileLocks, OneAtATimeAlsoInOneProcess) {
  {
    const auto first = FileLock::try_lock(path_);
    EXPECT_TRUE(first);
    EXPECT_FALSE(FileLock::try_lock(path_));
    EXPECT_FALSE(FileLock::try_lock(path_)) << "asking, and failing, gives nothing back";
  }
  EXPECT_TRUE(FileLock::try_lock(path_));
}

TEST_F(FileLocks, IsGivenBackWhenItsProcessIsKilled) {
  Pipe told = make_pipe();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto lock = FileLock::try_lock(path_);
    const char has = lock ? 'y' : 'n';
    if (::write(told.write.get(), &has, 1) == 1) ::pause();
    ::_exit(0);
  }
  EXPECT_EQ(read_some(told.read.get()), "y");
  EXPECT_FALSE(FileLock::try_lock(path_));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(FileLock::try_lock(path_));
}

TEST_F(FileLocks, WhereNoFileCanBeIsAnError) {
  EXPECT_THROW(FileLock::try_lock(folder_ / "missing" / "lock"), IoError);
}

}  // namespace
}  // namespace tesserae::os
