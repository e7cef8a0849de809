#include "tesserae/os/packet_socket.h"

#include <gtest/gtest.h>

#include <string>

#include "tesserae/base/error.h"
#include "tesserae/os/process.h"

namespace tesserae::os {
namespace {

TEST(PacketSocket, CarriesWhatWasSentAsItWasSent) {
  PacketPair pair = make_packet_pair();
  EXPECT_TRUE(send_packet(pair.ours.get(), "first", {}));
  EXPECT_TRUE(send_packet(pair.ours.get(), std::string("a\0b", 3), {}));
  EXPECT_EQ(receive_packet(pair.theirs.get()), "first");
  EXPECT_EQ(receive_packet(pair.theirs.get()), std::string("a\0b", 3));
  EXPECT_TRUE(send_packet(pair.theirs.get(), "back", {}));
  EXPECT_EQ(receive_packet(pair.ours.get()), "back");
}

TEST(PacketSocket, SaysThatTheOtherSideIsGone) {
  PacketPair pair = make_packet_pair();
  pair.theirs.reset();
  EXPECT_EQ(receive_packet(pair.ours.get()), std::nullopt);
  EXPECT_FALSE(send_packet(pair.ours.get(), "nobody", {}));
}

TEST(PacketSocket, RefusesMoreDescriptorsThanItCanSend) {
  PacketPair pair = make_packet_pair();
  EXPECT_THROW(send_packet(pair.ours.get(), "many", std::vector<int>(9, 0)), InvalidArgument);
}

TEST(PacketSocket, HandsDescriptorsToAProgramThatHasTheOtherEnd) {
  PacketPair pair = make_packet_pair();
  const std::string script =
      "import os, socket, sys\n"
      "connection = socket.socket(fileno=int(sys.argv[1]))\n"
      "order, descriptors, _, _ = socket.recv_fds(connection, 100, 1)\n"
      "os.write(descriptors[0], order + b' by it')\n";
  Process program = Process::spawn({.arguments = {"python3", "-c", script, std::to_string(pair.theirs.get())},
                                    .die_with_parent = true,
                                    .kept = pair.theirs.get()});
  pair.theirs.reset();
  Pipe pipe = make_pipe();
  ASSERT_TRUE(send_packet(pair.ours.get(), "written", {pipe.write.get()}));
  EXPECT_EQ(program.wait(Deadline(std::chrono::seconds(60))).value_or(Exit{.code = -1}).code, 0);
  pipe.write.reset();
  EXPECT_EQ(read_some(pipe.read.get()), "written by it");
}

}  // namespace
}  // namespace tesserae::os
