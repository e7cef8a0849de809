#include "tesserae/os/terminal.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "tesserae/os/descriptor.h"

namespace tesserae::os {
namespace {

/// Makes standard error something else while it lives.
class ErrorsAre {
 public:
  explicit ErrorsAre(int descriptor) : saved_(::dup(STDERR_FILENO)) { ::dup2(descriptor, STDERR_FILENO); }
  ~ErrorsAre() { ::dup2(saved_.get(), STDERR_FILENO); }

 private:
  Descriptor saved_;
};

TEST(Terminal, APipeIsNone) {
  const Pipe pipe = make_pipe();
  ::setenv("TERM", "xterm", 1);
  const ErrorsAre errors(pipe.write.get());
  EXPECT_FALSE(is_terminal(Stream::errors));
  EXPECT_EQ(columns(Stream::errors), 80);
}

TEST(Terminal, APseudoTerminalIsOne) {
  int master = -1, slave = -1;
  const winsize size{.ws_row = 10, .ws_col = 123, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(::openpty(&master, &slave, nullptr, nullptr, &size), 0);
  const Descriptor own_master(master), own_slave(slave);
  const ErrorsAre errors(slave);
  ::setenv("TERM", "xterm", 1);
  EXPECT_TRUE(is_terminal(Stream::errors));
  EXPECT_EQ(columns(Stream::errors), 123);
  ::setenv("TERM", "dumb", 1);
  EXPECT_FALSE(is_terminal(Stream::errors)) << "it cannot move its cursor";
}

}  // namespace
}  // namespace tesserae::os
