#include "tesserae/os/descriptor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tesserae/base/error.h"

namespace tesserae::os {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

bool is_open(int descriptor) {
  return ::fcntl(descriptor, F_GETFD) != -1;
}

TEST(Descriptor, ClosesWhatItOwns) {
  Pipe pipe = make_pipe();
  const int read = pipe.read.get(), write = pipe.write.get();
  EXPECT_TRUE(is_open(read) && is_open(write));
  EXPECT_TRUE(::fcntl(read, F_GETFD) & FD_CLOEXEC) << "not inherited";
  Descriptor moved = std::move(pipe.read);
  EXPECT_FALSE(pipe.read);
  EXPECT_TRUE(is_open(read));
  moved = std::move(pipe.write);
  EXPECT_FALSE(is_open(read)) << "assigned over";
  EXPECT_TRUE(is_open(write));
  const int released = moved.release();
  EXPECT_TRUE(is_open(released));
  ::close(released);
}

TEST(Descriptor, ReadsWhatIsThereThenTheEnd) {
  Pipe pipe = make_pipe();
  ASSERT_EQ(::write(pipe.write.get(), "hello", 5), 5);
  EXPECT_EQ(read_some(pipe.read.get(), 3), "hel");
  EXPECT_EQ(read_some(pipe.read.get()), "lo");
  ::fcntl(pipe.read.get(), F_SETFL, O_NONBLOCK);
  EXPECT_EQ(read_some(pipe.read.get()), "") << "nothing there, and it does not block";
  pipe.write.reset();
  EXPECT_EQ(read_some(pipe.read.get()), "");
  EXPECT_THROW(read_some(-1), IoError);
}

TEST(Descriptor, WaitsForTheFirstOneThatCanBeRead) {
  Pipe a = make_pipe(), b = make_pipe();
  const TimePoint start = now();
  EXPECT_THAT(wait_readable({a.read.get(), -1, b.read.get()}, Deadline(30ms)), IsEmpty());
  EXPECT_GE(now() - start, 30ms);
  ASSERT_EQ(::write(b.write.get(), "x", 1), 1);
  EXPECT_THAT(wait_readable({a.read.get(), -1, b.read.get()}, Deadline(60s)), ElementsAre(b.read.get()));
  a.write.reset();
  EXPECT_THAT(wait_readable({a.read.get(), b.read.get()}, Deadline(60s)), ElementsAre(a.read.get(), b.read.get()));
}

}  // namespace
}  // namespace tesserae::os
