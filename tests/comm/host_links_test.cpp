#include "tesserae/comm/deciding_host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/comm/membership.h"
#include "tesserae/comm/other_hosts.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/port.h"
#include "tests/os/scratch.h"

namespace tesserae::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The launchers of two hosts, in one process.
class HostLinks : public ::testing::Test {
 protected:
  /// Both look until then.
  bool until(const std::function<bool()>& condition, bool first_looks = true, bool second_looks = true) {
    for (const os::Deadline deadline(seconds(60)); !deadline.passed(); os::sleep_for(milliseconds(5))) {
      if (first_looks) others.look();
      if (second_looks) first->look();
      if (condition()) return true;
    }
    return false;
  }

  static constexpr milliseconds patience{1000};
  MembershipServer server{os::free_port()};
  OtherHosts others{server.store(), 2, patience};
  std::optional<DecidingHost> first{std::in_place, "127.0.0.1", server.port(), 1, patience};
};

TEST_F(HostLinks, TheFirstHearsHowRanksOfAnotherEnd) {
  EXPECT_FALSE(others.exit_of(2));
  first->report(2, {.code = 0, .signal = 9});
  first->report(3, {.code = 7});
  ASSERT_TRUE(until([&] { return others.exit_of(3).has_value(); }));
  EXPECT_EQ(others.exit_of(2)->signal, 9);
  EXPECT_EQ(others.exit_of(3)->code, 7);
  EXPECT_FALSE(others.exit_of(0));
}

TEST_F(HostLinks, OrdersComeOnceAndInOrder) {
  const Order kill{.kind = Order::Kind::kill, .process = 3};
  const Order start{.kind = Order::Kind::start, .process = 4, .rank = 3, .local_rank = 1, .ranks = 4, .epoch = 2};
  others.tell(1, kill);
  others.tell(1, kill);
  others.tell(1, start);
  const Order number{.kind = Order::Kind::number, .process = 2, .rank = 1};
  others.tell(1, number);
  std::vector<Order> told;
  ASSERT_TRUE(until([&] {
    for (const Order& order : first->orders()) told.push_back(order);
    return told.size() >= 3;
  }));
  EXPECT_THAT(told, ElementsAre(kill, start, number)) << "what has been killed is not killed again";
  EXPECT_THAT(first->orders(), IsEmpty());
}

TEST_F(HostLinks, AHostThatDoesNotBeatIsGivenUpForGood) {
  ASSERT_TRUE(until([&] { return server.store()->add("hosts/beats/1", 0) > 0; }));
  os::sleep_for(milliseconds(100));
  others.look();
  ASSERT_TRUE(until([&] { return others.given_up(1); }, true, /*second_looks=*/false));
  EXPECT_THAT(first->cut_off(), HasSubstr("nothing was heard of the job's first host for 1000 ms"))
      << "it knows before the first host goes on";
  ASSERT_TRUE(until([&] { return first->cut_off().find("goes on without this host") != std::string::npos; }));
  EXPECT_TRUE(others.given_up(1));
  EXPECT_FALSE(others.given_up(0));
}

TEST_F(HostLinks, AHostThatComesAgainIsRefusedAndGivenUp) {
  EXPECT_FALSE(others.given_up(1));
  EXPECT_THROW(DecidingHost("127.0.0.1", server.port(), 1, patience), IoError);
  const os::TimePoint begin = os::now();
  ASSERT_TRUE(until([&] { return others.given_up(1); }, true, /*second_looks=*/false));
  EXPECT_LT(os::now() - begin, seconds(60));
}

TEST_F(HostLinks, AllHearHowTheJobEnds) {
  EXPECT_FALSE(first->status());
  others.end(75);
  ASSERT_TRUE(until([&] { return first->status().has_value(); }, false));
  EXPECT_EQ(*first->status(), 75);
  os::sleep_for(patience + milliseconds(100));
  EXPECT_EQ(first->cut_off(), "") << "nobody is there any more, and nobody need be";
}

TEST_F(HostLinks, WhoeverHasLeftIsNotWaitedFor) {
  first.reset();
  const os::TimePoint begin = os::now();
  others.end(0);
  EXPECT_TRUE(others.has_left(1));
  EXPECT_LT(os::now() - begin, seconds(4));
}

/// The same, where another host may take over.
class HostLinksWithSuccession : public os::Scratch {
 protected:
  static constexpr milliseconds patience{1000};

  bool until(const std::function<bool()>& condition) {
    for (const os::Deadline deadline(seconds(60)); !deadline.passed(); os::sleep_for(milliseconds(5))) {
      others.look();
      if (condition()) return true;
    }
    return false;
  }

  /// A host that has come and beats no more.
  void lose_the_other() { stopped.emplace("127.0.0.1", server.port(), 2, patience); }

  MembershipServer server{os::free_port(), {.job = "7f3a"}};
  Succession succession{folder_, "7f3a"};
  const Claim own{.address = "127.0.0.1", .port = server.port()};
  const bool claimed = succession.claim(own);
  OtherHosts others{server.store(), 3, patience, succession, own};
  std::optional<DecidingHost> stopped;
};

TEST_F(HostLinksWithSuccession, AHostIsGivenUpByAClaim) {
  lose_the_other();
  ASSERT_TRUE(until([&] { return others.given_up(2); }));
  const auto newest = succession.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->generation, 1);
  EXPECT_EQ(newest->host, 0);
  EXPECT_THAT(newest->without, ElementsAre(2));
  EXPECT_FALSE(others.deposed_by());
}

TEST_F(HostLinksWithSuccession, OneThatComesTooLateDecidesNoMore) {
  lose_the_other();
  ASSERT_TRUE(succession.claim({.generation = 1, .host = 2, .address = "127.0.0.1", .port = 1, .without = {0}}));
  ASSERT_TRUE(until([&] { return others.deposed_by().has_value(); }));
  EXPECT_EQ(others.deposed_by(), 2);
  EXPECT_FALSE(others.given_up(2));
}

TEST_F(HostLinksWithSuccession, WhileStorageIsGoneNobodyIsGivenUp) {
  lose_the_other();
  const os::Path aside = folder_.native() + "-aside";
  os::files().rename(folder_, aside);
  const os::Deadline a_while(milliseconds(5000));
  EXPECT_TRUE(until([&] { return a_while.passed(); }));
  EXPECT_FALSE(others.given_up(2));
  os::files().rename(aside, folder_);
  EXPECT_TRUE(until([&] { return others.given_up(2); }));
}

TEST_F(HostLinksWithSuccession, AtTheEndAllClaimsAreGoneOnceAllHaveHeard) {
  lose_the_other();
  std::optional<DecidingHost> second(std::in_place, "127.0.0.1", server.port(), 1, milliseconds(60'000));
  ASSERT_TRUE(until([&] {
    second->look();
    return others.given_up(2);
  }));
  second.reset();
  ASSERT_TRUE(until([&] { return others.has_left(1); }));
  others.end(0);
  EXPECT_THAT(os::files().list(folder_), IsEmpty());
}

TEST_F(HostLinksWithSuccession, WhoeverHasNotHeardOfTheEndFindsItThere) {
  stopped.emplace("127.0.0.1", server.port(), 2, milliseconds(60'000));
  OtherHosts patient{server.store(), 3, milliseconds(60'000), succession, own};
  patient.end(75);
  EXPECT_EQ(succession.newest()->status, 75);
}

TEST_F(HostLinksWithSuccession, WhatIsToldOfTheJobIsKnownToThoseThatMayTakeOver) {
  DecidingHost second("127.0.0.1", server.port(), 1, milliseconds(60'000));
  server.remember({{"run", "runs/7"}});
  lose_the_other();
  ASSERT_TRUE(until([&] {
    second.look();
    return others.given_up(2) && second.known()->gone == std::vector{2};
  }));
  EXPECT_EQ(second.known()->job, "7f3a");
  EXPECT_EQ(second.known()->host, 0);
  EXPECT_EQ(second.known()->remembered.at("run"), "runs/7");
}

TEST_F(HostLinksWithSuccession, RanksOfAHostComeOverToAnother) {
  EXPECT_EQ(others.come_over(1), std::nullopt);
  const std::vector<RankProcess> processes = {{4, 2, 0, "a"}, {3, 3, 1, "b"}};
  DecidingHost second("127.0.0.1", server.port(), 1, milliseconds(60'000), seconds(60), processes);
  EXPECT_TRUE(until([&] { return others.come_over(1) == processes; }));
}

TEST_F(HostLinksWithSuccession, OneThatIsAbandonedHearsNoGoodbye) {
  {
    DecidingHost second("127.0.0.1", server.port(), 1, milliseconds(60'000));
    second.report(3, {.code = 0, .signal = 9});
    second.abandon();
  }
  DecidingHost third("127.0.0.1", server.port(), 2, milliseconds(60'000));
  third.report(4, {});
  ASSERT_TRUE(until([&] {
    third.look();
    return others.exit_of(4).has_value();
  }));
  EXPECT_FALSE(others.has_left(1));
  EXPECT_FALSE(others.exit_of(3));
}

TEST(IsReached, OneThatServesAndNoOther) {
  std::optional<MembershipServer> server{std::in_place, os::free_port()};
  const uint16_t port = server->port();
  EXPECT_TRUE(is_reached("127.0.0.1", port, seconds(60)));
  server.reset();
  EXPECT_FALSE(is_reached("127.0.0.1", port, seconds(1)));
}

TEST(DecidingHostOfNobody, IsAloneOnceTheStoreIsGone) {
  std::optional<MembershipServer> server{std::in_place, os::free_port()};
  DecidingHost first("127.0.0.1", server->port(), 1, milliseconds(60'000));
  first.look();
  os::sleep_for(milliseconds(300));
  EXPECT_FALSE(first.is_alone());
  server.reset();
  for (const os::Deadline deadline(seconds(60)); !first.is_alone() && !deadline.passed(); first.look()) {
    os::sleep_for(milliseconds(5));
  }
  EXPECT_TRUE(first.is_alone()) << "nobody has made room for what it says";
  EXPECT_EQ(first.cut_off(), "");
}

}  // namespace
}  // namespace tesserae::comm
