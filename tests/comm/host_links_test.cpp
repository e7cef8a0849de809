#include "tesserae/comm/host_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/comm/membership.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/port.h"

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
  std::optional<FirstHost> first{std::in_place, "127.0.0.1", server.port(), 1, patience};
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
  EXPECT_THROW(FirstHost("127.0.0.1", server.port(), 1, patience), IoError);
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

TEST(FirstHostOfNobody, IsAloneOnceTheStoreIsGone) {
  std::optional<MembershipServer> server{std::in_place, os::free_port()};
  FirstHost first("127.0.0.1", server->port(), 1, milliseconds(60'000));
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
