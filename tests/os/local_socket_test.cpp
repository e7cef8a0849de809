#include "tesserae/os/local_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "tests/os/scratch.h"

namespace tesserae::os {
namespace {

using ::testing::HasSubstr;

using LocalSocket = Scratch;

Descriptor accepted(LocalListener& listener) {
  EXPECT_FALSE(wait_readable({listener.descriptor()}, Deadline(std::chrono::seconds(10))).empty());
  return listener.accept();
}

TEST_F(LocalSocket, CarriesBytesBothWays) {
  LocalListener listener(folder_ / "s");
  EXPECT_FALSE(listener.accept()) << "nobody yet";
  const Descriptor client = connect_local(folder_ / "s");
  ASSERT_TRUE(client);
  const Descriptor server = accepted(listener);
  ASSERT_TRUE(server);
  EXPECT_EQ(send_some(client.get(), "hello"), 5u);
  wait_readable({server.get()}, Deadline(std::chrono::seconds(10)));
  EXPECT_EQ(read_some(server.get()), "hello");
  EXPECT_EQ(send_some(server.get(), "back"), 4u);
  wait_readable({client.get()}, Deadline(std::chrono::seconds(10)));
  EXPECT_EQ(read_some(client.get()), "back");
}

TEST_F(LocalSocket, IsForThisUserOnlyWhateverTheUmask) {
  const mode_t before = ::umask(0);
  const LocalListener listener(folder_ / "s");
  ::umask(before);
  struct stat found {};
  ASSERT_EQ(::stat((folder_ / "s").c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
}

TEST_F(LocalSocket, ALiveOneIsNotReplacedAndADeadOneIs) {
  const Path path = folder_ / "s";
  {
    const LocalListener first(path);
    try {
      const LocalListener second(path);
      FAIL() << "two listen at one path";
    } catch (const AddressInUse& error) {
      EXPECT_THAT(error.what(), HasSubstr(path.native()));
    }
    EXPECT_TRUE(connect_local(path)) << "the second try left the first alone";
  }
  EXPECT_FALSE(files().exists(path));

  const pid_t child = ::fork();
  if (child == 0) {
    const LocalListener dies(path);
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(files().exists(path));
  EXPECT_FALSE(connect_local(path)) << "what is left behind is nobody";
  const LocalListener next(path);
  EXPECT_TRUE(connect_local(path));
}

TEST_F(LocalSocket, LeavesTheFileOfAnotherListenerAlone) {
  const Path path = folder_ / "s";
  auto first = std::make_unique<LocalListener>(path);
  files().remove(path);
  const LocalListener second(path);
  first.reset();
  EXPECT_TRUE(connect_local(path));
}

TEST_F(LocalSocket, AFileThatIsNoSocketStays) {
  files().write(folder_ / "s", "text");
  EXPECT_THROW(LocalListener(folder_ / "s"), IoError);
  EXPECT_EQ(files().read(folder_ / "s"), "text");
  EXPECT_FALSE(connect_local(folder_ / "s"));
}

TEST_F(LocalSocket, TakesPathsLongerThanASocketName) {
  const Path deep = folder_ / std::string(120, 'd') / std::string(120, 'e');
  files().make_directories(deep);
  {
    LocalListener listener(deep / "s");
    EXPECT_TRUE(files().exists(deep / "s"));
    const Descriptor client = connect_local(deep / "s");
    EXPECT_TRUE(client);
    EXPECT_TRUE(accepted(listener));
  }
  EXPECT_FALSE(files().exists(deep / "s"));
  try {
    const LocalListener listener(folder_ / std::string(200, 'n'));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("too long"));
  }
  EXPECT_THROW(LocalListener(folder_ / "no-such-folder" / "s"), IoError);
}

TEST_F(LocalSocket, WritingToOneThatIsGoneFails) {
  LocalListener listener(folder_ / "s");
  Descriptor client = connect_local(folder_ / "s");
  const Descriptor server = accepted(listener);
  client.reset();
  EXPECT_THROW(send_some(server.get(), "hello"), IoError);  // and no SIGPIPE
}

TEST_F(LocalSocket, OneThatDoesNotReadBlocksNobody) {
  LocalListener listener(folder_ / "s");
  const Descriptor client = connect_local(folder_ / "s");
  const Descriptor server = accepted(listener);
  const std::string block(1 << 16, 'x');
  size_t sent = 0, more = 0;
  while ((more = send_some(server.get(), block)) > 0) sent += more;
  EXPECT_GT(sent, 0u);
}

}  // namespace
}  // namespace tesserae::os
