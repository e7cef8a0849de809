#include "tesserae/comm/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <future>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/comm/error.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"
#include "tests/os/scratch.h"

namespace tesserae::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class MembershipTest : public ::testing::Test {
 protected:
  MembershipTest() { ::setenv(epoch_variable, "0", /*overwrite=*/1); }
  ~MembershipTest() override { ::unsetenv(epoch_variable); }

  mesh::Launch launch() const {
    mesh::Launch launch;
    launch.size = 2;
    launch.port = server_.port();
    return launch;
  }

  /// The store takes what it is told without an answer: whoever asks through another connection may come first. After
  /// this it has what the launcher told.
  void begin_epoch(int ranks) {
    server_.begin_epoch(ranks);
    EXPECT_EQ(server_.failed(), 0);
  }

  MembershipServer server_;
};

/// Whether somebody takes connections at that port of another address of this host (127.0.0.2).
bool is_reached_at_another_address(uint16_t port) {
  const os::Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

TEST_F(MembershipTest, TheStoreOfOneHostIsServedToThatHostOnly) {
  EXPECT_TRUE(is_reached_at_another_address(server_.port()));
  const MembershipServer alone(0, {}, Serve::this_host);
  EXPECT_FALSE(is_reached_at_another_address(alone.port()));
  mesh::Launch here = launch();
  here.port = alone.port();
  EXPECT_TRUE(Membership(here, /*survives=*/true).recovers());
  try {
    const MembershipServer second(alone.port(), {}, Serve::this_host);
    ADD_FAILURE() << "two at one port";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr(cat("port ", alone.port(), " of 127.0.0.1 is in use")));
  }
}

TEST_F(MembershipTest, ARankWaitsForTheNextEpochAndTellsWhoIsSilent) {
  Membership rank(launch(), /*survives=*/true);
  EXPECT_TRUE(rank.recovers());
  EXPECT_EQ(rank.epoch(), 0);
  EXPECT_FALSE(rank.is_over());
  EXPECT_EQ(server_.failed(), 0);
  auto next = std::async(std::launch::async, [&rank] { return rank.next_epoch({1}, seconds(60)); });
  while (server_.failed() == 0) {
  }
  ASSERT_EQ(server_.missing().size(), 1);
  EXPECT_EQ(server_.missing()[0].rank, 1);
  EXPECT_EQ(server_.missing()[0].by, 0);
  server_.begin_epoch(2);
  EXPECT_TRUE(next.get());
  EXPECT_EQ(rank.epoch(), 1);
  EXPECT_FALSE(rank.is_over());
  EXPECT_EQ(server_.failed(), 0) << "in the new epoch";
  EXPECT_TRUE(server_.missing().empty());
}

TEST_F(MembershipTest, AnEpochIsOverOnceTheNextHasBegun) {
  Membership rank(launch(), /*survives=*/true);
  begin_epoch(2);
  EXPECT_TRUE(rank.is_over());
  begin_epoch(2);
  EXPECT_TRUE(rank.next_epoch({}, seconds(60)));
  EXPECT_TRUE(rank.is_over()) << "the launcher is at 2";
  EXPECT_TRUE(rank.next_epoch({}, seconds(60)));
  EXPECT_FALSE(rank.is_over());
}

TEST_F(MembershipTest, ARankHearsThatTheJobEnds) {
  Membership rank(launch(), /*survives=*/true);
  server_.end();
  EXPECT_FALSE(rank.next_epoch({}, seconds(60)));
}

TEST_F(MembershipTest, ARankDoesNotWaitForEver) {
  Membership rank(launch(), /*survives=*/true);
  EXPECT_FALSE(rank.next_epoch({}, milliseconds(50)));
}

TEST_F(MembershipTest, WhatIsRememberedOutlivesThoseWhoKnew) {
  Membership first(launch(), true), second(launch(), /*survives=*/true);
  EXPECT_EQ(second.remembered("run"), "");
  first.remember("run", "runs/7");
  EXPECT_EQ(first.remembered("run"), "runs/7");  // the store has it now
  EXPECT_EQ(second.remembered("run"), "runs/7");
  EXPECT_EQ(second.remembered("saved"), "");
}

TEST_F(MembershipTest, RankZeroAsksForAnotherNumberOfRanks) {
  Membership rank(launch(), /*survives=*/false);
  EXPECT_TRUE(rank.served());
  EXPECT_FALSE(rank.next_epoch({}, seconds(60))) << "a loss ends the job";
  EXPECT_FALSE(server_.asked_ranks());
  rank.ask_for_ranks(4);
  EXPECT_FALSE(rank.is_over()) << "an answer: the store has it now";
  EXPECT_EQ(server_.asked_ranks(), 4);
  server_.begin_epoch(4);
  EXPECT_FALSE(server_.asked_ranks()) << "in the new epoch";
  EXPECT_TRUE(rank.wait_for_epoch(seconds(60)));
  EXPECT_EQ(rank.ranks(), 4);
  EXPECT_EQ(rank.epoch(), 1);
}

TEST_F(MembershipTest, ThoseThatAreLeftGetNewNumbers) {
  mesh::Launch last = launch();
  last.size = 4;
  last.rank = 3;
  Membership rank(last, /*survives=*/true);
  EXPECT_EQ(rank.rank(), 3);
  server_.begin_epoch_of({0, 2, 3});
  EXPECT_TRUE(rank.next_epoch({}, seconds(60)));
  EXPECT_TRUE(rank.is_of_those_left());
  EXPECT_EQ(rank.ranks(), 3);
  EXPECT_EQ(rank.rank(), 2);
  server_.begin_epoch_of({1, 2});
  EXPECT_TRUE(rank.next_epoch({}, seconds(60)));
  EXPECT_EQ(rank.rank(), 1) << "of the epoch before";
  begin_epoch(1);
  EXPECT_TRUE(rank.wait_for_epoch(seconds(60)));
  EXPECT_FALSE(rank.is_of_those_left());
  EXPECT_FALSE(rank.has_place());
}

TEST_F(MembershipTest, ASpareProcessWaitsForItsPlace) {
  ::setenv(spare_variable, "3", /*overwrite=*/1);
  auto waiting = std::async(std::launch::async, [this] { return Membership(launch(), /*survives=*/true); });
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  begin_epoch(2);
  server_.give_place(/*spare=*/2, 0, 2);
  server_.give_place(/*spare=*/3, 1, 2);
  begin_epoch(2);
  const Membership rank = waiting.get();
  ::unsetenv(spare_variable);
  EXPECT_EQ(rank.epoch(), 2);
  EXPECT_EQ(rank.rank(), 1);
  EXPECT_EQ(rank.ranks(), 2);
  EXPECT_TRUE(rank.has_place());
}

TEST_F(MembershipTest, AnotherLauncherReplacesNobody) {
  ::unsetenv(epoch_variable);
  Membership rank(launch(), /*survives=*/true);
  EXPECT_FALSE(rank.recovers());
  EXPECT_FALSE(rank.next_epoch({}, seconds(60)));
  EXPECT_EQ(rank.remembered("run"), "");
}

/// A rank of host 1, whose launcher's host is lost.
class SuccessorTest : public os::Scratch {
 protected:
  SuccessorTest() {
    ::setenv(epoch_variable, "0", /*overwrite=*/1);
    ::setenv(process_variable, "own", 1);
    ::setenv(succession_variable, folder_.c_str(), 1);
    EXPECT_TRUE(succession.claim({.address = "127.0.0.1", .port = first->port()}));
    rank.emplace(launch(), /*survives=*/true);
    rank->remember("run", "runs/7");
    EXPECT_EQ(rank->remembered("run"), "runs/7");
    known = all_remembered(first->store());
  }
  ~SuccessorTest() override {
    for (const char* variable : {epoch_variable, process_variable, succession_variable}) {
      ::unsetenv(variable);
    }
  }

  mesh::Launch launch() const {
    mesh::Launch launch;
    launch.size = 4;
    launch.rank = 3;
    launch.port = first->port();
    return launch;
  }

  /// What the launcher of host 1 does then.
  void take_over() {
    second.emplace(uint16_t{0}, Mandate{.job = "7f3a", .generation = 1, .host = 1});
    second->remember(known);
    EXPECT_TRUE(
        succession.claim({.generation = 1, .host = 1, .address = "127.0.0.1", .port = second->port(), .without = {0}}));
  }

  Succession succession{folder_, "7f3a"};
  std::optional<MembershipServer> first{std::in_place, uint16_t{0}, Mandate{.job = "7f3a"}}, second;
  std::optional<Membership> rank;
  std::map<std::string, std::string> known;
};

TEST_F(SuccessorTest, ARankTurnsToTheLauncherThatHasTakenOver) {
  first.reset();
  take_over();
  second->begin_epoch_of(std::vector<std::string>{"other", "own"});
  ASSERT_TRUE(rank->next_epoch({0, 1}, seconds(60)));
  EXPECT_TRUE(rank->is_of_those_left());
  EXPECT_EQ(rank->rank(), 1);
  EXPECT_EQ(rank->ranks(), 2);
  EXPECT_EQ(rank->epoch(), second->epoch());
  EXPECT_EQ(rank->remembered("run"), "runs/7");
  EXPECT_EQ(rank->world().launch().port, second->port()) << "where the ranks meet from now on";
  rank->ask_for_ranks(1);
  EXPECT_FALSE(rank->is_over());
  EXPECT_EQ(second->asked_ranks(), 1);
}

TEST_F(SuccessorTest, ItWaitsUntilThereIsOne) {
  first.reset();
  auto next = std::async(std::launch::async, [this] { return rank->next_epoch({}, seconds(60)); });
  EXPECT_EQ(next.wait_for(milliseconds(200)), std::future_status::timeout);
  take_over();
  EXPECT_EQ(next.wait_for(milliseconds(200)), std::future_status::timeout) << "it knows not yet with whom";
  second->begin_epoch_of(std::vector<std::string>{"own"});
  EXPECT_TRUE(next.get());
  EXPECT_EQ(rank->ranks(), 1);
}

TEST_F(SuccessorTest, AlsoWhileTheFirstOneAnswers) {
  auto next = std::async(std::launch::async, [this] { return rank->next_epoch({}, seconds(60)); });
  take_over();
  second->begin_epoch_of(std::vector<std::string>{"own"});
  EXPECT_TRUE(next.get()) << "whoever has claimed counts";
  EXPECT_EQ(rank->world().launch().port, second->port());
}

TEST_F(SuccessorTest, AlsoIfThatOneHasClaimedAgain) {
  first.reset();
  take_over();
  EXPECT_TRUE(succession.claim(
      {.generation = 2, .host = 1, .address = "127.0.0.1", .port = second->port(), .without = {0, 2}}));
  second->begin_epoch_of(std::vector<std::string>{"own"});
  EXPECT_TRUE(rank->next_epoch({}, seconds(60)));
  EXPECT_EQ(rank->epoch(), second->epoch());
}

TEST_F(SuccessorTest, WhatIsToldALauncherThatIsLostIsALossLikeAnother) {
  first.reset();
  EXPECT_THROW(rank->remembered("saved"), PeerLost) << "which waits for an answer";
  EXPECT_THROW(rank->remember("saved", "7"), PeerLost);
  EXPECT_THROW(rank->ask_for_ranks(2), PeerLost);
}

TEST_F(SuccessorTest, WhomItDoesNotKnowHasNoPart) {
  first.reset();
  take_over();
  second->begin_epoch_of(std::vector<std::string>{"other", "another"});
  EXPECT_FALSE(rank->next_epoch({}, seconds(60)));
}

TEST_F(SuccessorTest, OneThatGoesOnWithoutAnotherHostIsNoSuccessor) {
  EXPECT_TRUE(
      succession.claim({.generation = 1, .host = 0, .address = "127.0.0.1", .port = first->port(), .without = {2}}));
  first->begin_epoch_of(std::vector<int>{0, 1, 3});
  EXPECT_TRUE(rank->next_epoch({2}, seconds(60)));
  EXPECT_EQ(rank->rank(), 2);
  EXPECT_EQ(rank->epoch(), 1);
}

TEST_F(SuccessorTest, NobodyTakesOverAJobThatIsOver) {
  first.reset();
  EXPECT_TRUE(succession.claim({.generation = 1, .host = 0, .address = "127.0.0.1", .port = 7777, .status = 0}));
  const os::TimePoint begin = os::now();
  EXPECT_FALSE(rank->next_epoch({}, seconds(600)));
  EXPECT_LT(os::now() - begin, seconds(300)) << "it does not wait for another one";
}

}  // namespace
}  // namespace tesserae::comm
