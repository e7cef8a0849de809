#include "tesserae/os/tcp_listener.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/os/wake_up.h"
#include "tests/watch/talk.h"

namespace tesserae::os {
namespace {

using std::chrono::seconds;

TEST(TcpListener, ListensWhereItIsTold) {
  TcpListener listener("localhost", 0);
  EXPECT_TRUE(listener.loopback());
  EXPECT_GT(listener.port(), 0);
  EXPECT_FALSE(listener.accept()) << "nobody is there, and it does not wait";
  TcpListener all("0.0.0.0", 0);
  EXPECT_FALSE(all.loopback());
  EXPECT_EQ(all.address(), "0.0.0.0");
}

TEST(TcpListener, SaysThatAPortIsTaken) {
  TcpListener listener("127.0.0.1", 0);
  EXPECT_THROW(TcpListener("127.0.0.1", listener.port()), AddressInUse);
  EXPECT_THROW(TcpListener("203.0.113.1", 0), IoError) << "another host's";
  EXPECT_THROW(TcpListener("no such host", 0), IoError);
}

TEST(TcpListener, CarriesBytes) {
  TcpListener listener("127.0.0.1", 0);
  watch::Talk talk(listener.port());
  ASSERT_FALSE(wait_readable({listener.descriptor()}, Deadline(seconds(20))).empty());
  const Descriptor connection = listener.accept();
  ASSERT_TRUE(connection);
  talk.send("hello");
  std::vector<Waited> waited = {{.descriptor = -1, .to_read = true},
                                {.descriptor = connection.get(), .to_read = true, .to_write = true}};
  const Deadline end(seconds(20));
  while (!waited[1].readable && !end.passed()) wait_ready(waited, end);
  EXPECT_TRUE(waited[1].writable);
  EXPECT_FALSE(waited[0].readable);
  EXPECT_EQ(read_some(connection.get()), "hello");
}

TEST(WakeUp, WakesUntilItIsCleared) {
  WakeUp wake;
  std::vector<Waited> waited = {{.descriptor = wake.descriptor(), .to_read = true}};
  wait_ready(waited, Deadline(std::chrono::milliseconds(1)));
  EXPECT_FALSE(waited[0].readable);
  wake.wake();
  wake.wake();
  wait_ready(waited, Deadline(seconds(20)));
  EXPECT_TRUE(waited[0].readable);
  wake.clear();
  wait_ready(waited, Deadline(std::chrono::milliseconds(1)));
  EXPECT_FALSE(waited[0].readable);
}

}  // namespace
}  // namespace tesserae::os
