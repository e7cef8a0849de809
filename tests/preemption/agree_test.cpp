#include "tesserae/preemption/agree.h"

#include <gtest/gtest.h>

#include <csignal>
#include <vector>

namespace tesserae::preemption {
namespace {

TEST(Agree, NobodyWasAsked) {
  comm::run_local(3, [](comm::Fabric& fabric) { EXPECT_FALSE(agree(std::nullopt, fabric)); });
}

TEST(Agree, WhatOneRankHeardAllKnow) {
  comm::run_local(4, [](comm::Fabric& fabric) {
    std::optional<Notice> own;
    if (fabric.rank() == 2) own = {SIGUSR1, "SIGUSR1"};
    if (fabric.rank() == 3) own = {SIGTERM, "the command `test -e /a b`"};
    const Notice all = agree(own, fabric).value();
    EXPECT_EQ(all.signal, SIGUSR1);
    EXPECT_EQ(all.reason, "SIGUSR1 (rank 2)");
  });
  comm::run_local(2, [](comm::Fabric& fabric) {
    std::optional<Notice> own;
    if (fabric.rank() == 1) own = {SIGTERM, "the command `test -e /a b`"};
    EXPECT_EQ(agree(own, fabric).value().reason, "the command `test -e /a b` (rank 1)");
  });
}

TEST(Agree, OneRankAgreesWithItself) {
  comm::run_local(1, [](comm::Fabric& fabric) {
    EXPECT_FALSE(agree(std::nullopt, fabric));
    EXPECT_EQ(agree(Notice{SIGTERM, "SIGTERM"}, fabric).value().reason, "SIGTERM");
  });
}

TEST(Agree, OneRankOfAHostAsks) {
  // What is left of a job is numbered anew, across its hosts: the launcher's numbers within a host say nothing then.
  const auto asks = [](int rank) {
    return asks_for_host(mesh::World::joined(rank, 4, true).with_hosts({"one", "two", "two", "three"}));
  };
  EXPECT_TRUE(asks(0));
  EXPECT_TRUE(asks(1));
  EXPECT_FALSE(asks(2));
  EXPECT_TRUE(asks(3));
}

}  // namespace
}  // namespace tesserae::preemption
