#include "tesserae/cost/estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/cost/memory.h"
#include "tesserae/cost/traffic.h"

// Each expected value is worked out by hand from the formulas of docs/auto.md.

namespace tesserae::cost {
namespace {

using mesh::Degrees;
using ::testing::HasSubstr;

constexpr double psi = 1'000'000;

/// `hosts` with 4 ranks each; 1M parameters in fp32, 10 blocks of 90k and a root of 100k; AdamW.
Facts model(int hosts) {
  Facts facts;
  for (int rank = 0; rank < 4 * hosts; ++rank) facts.host_of.push_back(rank / 4);
  facts.parameters = 1'000'000;
  facts.root_unit = 100'000;
  facts.largest_unit = 90'000;
  facts.units = 11;
  return facts;
}

TEST(Estimate, MemoryOfReplicas) {
  const RankMemory memory = memory_of_rank(model(1), {1, 1, 1}, 0);
  EXPECT_DOUBLE_EQ(memory.pieces, 0) << "the master is what is computed with";
  EXPECT_DOUBLE_EQ(memory.masters, 4 * psi);
  EXPECT_DOUBLE_EQ(memory.state, 8 * psi);
  EXPECT_DOUBLE_EQ(memory.gradients, 4 * psi);
  EXPECT_DOUBLE_EQ(memory.gathered, 0);
  EXPECT_DOUBLE_EQ(memory.reductions, 4 * (100e3 + 2 * 90e3));
  EXPECT_DOUBLE_EQ(memory.total(), 16 * psi + 1'120'000);
}

TEST(Estimate, MemoryOfFullShardingAddsUnitsInFlight) {
  const RankMemory memory = memory_of_rank(model(1), {4, 4, 4}, 3);
  EXPECT_DOUBLE_EQ(memory.pieces, 0);
  EXPECT_DOUBLE_EQ(memory.masters + memory.state + memory.gradients, 16 * psi / 4);
  EXPECT_DOUBLE_EQ(memory.gathered, 4 * (100e3 + 2 * 90e3));
}

TEST(Estimate, MemoryOfThreeDegreesInBf16) {
  Facts facts = model(2);
  facts.compute_bytes = facts.reduce_bytes = 2;
  const RankMemory memory = memory_of_rank(facts, {2, 4, 8}, 5);
  EXPECT_DOUBLE_EQ(memory.pieces, 2 * psi / 2);
  EXPECT_DOUBLE_EQ(memory.masters, 4 * psi / 8);
  EXPECT_DOUBLE_EQ(memory.state, 8 * psi / 8);
  EXPECT_DOUBLE_EQ(memory.gradients, 4 * psi / 8) << "final gradients have the masters' dtype";
  EXPECT_DOUBLE_EQ(memory.gathered, 2 * 280e3);
  EXPECT_DOUBLE_EQ(memory.reductions, 2 * 280e3);
}

TEST(Estimate, ReplicasInAnotherDtypeAreGatheredByACast) {
  Facts facts = model(1);
  facts.compute_bytes = 2;
  const RankMemory memory = memory_of_rank(facts, {1, 1, 1}, 0);
  EXPECT_DOUBLE_EQ(memory.pieces, 0);
  EXPECT_DOUBLE_EQ(memory.gathered, 2 * 280e3);
}

TEST(Estimate, AccumulationKeepsWholeGradientsOrPieces) {
  Facts facts = model(1);
  facts.micro_batches = 4;
  EXPECT_DOUBLE_EQ(memory_of_rank(facts, {2, 2, 4}, 0).gradients, 4 * psi / 4 + 4 * psi);
  EXPECT_DOUBLE_EQ(memory_of_rank(facts, {2, 2, 4}, 0).reductions, 0) << "they are reduced where they add up";
  facts.two_hop = true;
  EXPECT_DOUBLE_EQ(memory_of_rank(facts, {2, 2, 4}, 0).reductions, 4 * (100e3 + 2 * 90e3));
  EXPECT_DOUBLE_EQ(memory_of_rank(facts, {2, 2, 4}, 0).gradients, 4 * psi / 4 + 4 * psi / 2);
}

TEST(Estimate, UnitsThatAreKeptAreAllInMemory) {
  Facts facts = model(1);
  facts.free_after_forward = false;
  EXPECT_DOUBLE_EQ(memory_of_rank(facts, {4, 4, 4}, 0).gathered, 4 * psi);
}

TEST(Estimate, AHostHoldsItsRanksAndOneSharedCopyForEachGroup) {
  Facts facts = model(1);
  const double own = 8 * psi + 4 * psi + 0;  // state and gradients of all ranks together, masters in the copy
  facts.shared_copy = true;
  EXPECT_DOUBLE_EQ(memory_of(facts, {4, 4, 4}), own + 4 * psi + 4 * 1'120'000) << "one copy, no buffers of gathers";
  EXPECT_DOUBLE_EQ(memory_of(facts, {2, 2, 2}), 2 * own + 2 * 4 * psi + 4 * 1'120'000) << "two groups, two copies";
  EXPECT_DOUBLE_EQ(memory_of(facts, {2, 2, 4}), own + 4 * psi + 2 * 4 * psi + 4 * 1'120'000)
      << "masters of their own beside the copies";
  facts.ranks_share_place = false;
  facts.shared_copy = false;
  EXPECT_DOUBLE_EQ(memory_of(facts, {4, 4, 4}), memory_of_rank(facts, {4, 4, 4}, 0).total()) << "a device has one rank";
}

TEST(Estimate, AHostHoldsTheTensorParallelRanksOfEachRank) {
  Facts facts = model(1);
  const double one = memory_of(facts, {2, 2, 2});
  facts.tensor = 2;
  EXPECT_DOUBLE_EQ(memory_of(facts, {2, 2, 2}), 2 * one);
  facts.ranks_share_place = false;
  EXPECT_DOUBLE_EQ(memory_of(facts, {2, 2, 2}), one / 4) << "a device has one of them";
}

TEST(Estimate, GroupsThatSpanHostsShareNothing) {
  Facts facts = model(2);
  facts.shared_copy = true;
  EXPECT_DOUBLE_EQ(memory_of(facts, {8, 8, 8}), 4 * (16 * psi / 8 + 2 * 1'120'000));
}

TEST(Estimate, TrafficOfEachHop) {
  const Traffic ddp = traffic_of(model(2), {1, 1, 1});
  EXPECT_EQ(ddp.gather.bytes + ddp.first_hop.bytes + ddp.second_hop.bytes + ddp.refresh.bytes, 0);
  EXPECT_DOUBLE_EQ(ddp.third_hop.bytes, 2 * 4 * psi * 7 / 8);
  EXPECT_DOUBLE_EQ(ddp.third_hop.calls, 11);
  EXPECT_TRUE(ddp.third_hop.crosses);

  const Traffic full = traffic_of(model(2), {8, 8, 8});
  EXPECT_DOUBLE_EQ(full.gather.bytes, 2 * 4 * psi * 7 / 8) << "for forward and for backward";
  EXPECT_DOUBLE_EQ(full.first_hop.bytes, 4 * psi * 7 / 8);
  EXPECT_EQ(full.third_hop.bytes + full.refresh.bytes, 0);
  EXPECT_TRUE(full.gather.crosses);

  const Traffic hybrid = traffic_of(model(2), {4, 4, 4});
  EXPECT_FALSE(hybrid.gather.crosses);
  EXPECT_FALSE(hybrid.first_hop.crosses);
  EXPECT_TRUE(hybrid.third_hop.crosses);
  EXPECT_DOUBLE_EQ(hybrid.third_hop.bytes, 2 * 4 * psi / 4 * 1 / 2);

  const Traffic three = traffic_of(model(2), {2, 4, 8});
  EXPECT_DOUBLE_EQ(three.second_hop.bytes, 4 * psi / 4 * 1 / 2);
  EXPECT_TRUE(three.second_hop.crosses);
  EXPECT_DOUBLE_EQ(three.refresh.bytes, 4 * psi / 2 * 3 / 4);
  EXPECT_TRUE(three.refresh.crosses);
}

TEST(Estimate, TrafficOfAccumulation) {
  Facts facts = model(1);
  facts.micro_batches = 3;
  EXPECT_DOUBLE_EQ(traffic_of(facts, {4, 4, 4}).gather.bytes, 3 * 2 * 4 * psi * 3 / 4);
  EXPECT_DOUBLE_EQ(traffic_of(facts, {4, 4, 4}).first_hop.bytes, 4 * psi * 3 / 4);
  facts.two_hop = true;
  EXPECT_DOUBLE_EQ(traffic_of(facts, {4, 4, 4}).first_hop.bytes, 3 * 4 * psi * 3 / 4);
  facts.free_after_forward = false;
  EXPECT_DOUBLE_EQ(traffic_of(facts, {4, 4, 4}).gather.bytes, 3 * 4 * psi * 3 / 4);
  facts.free_after_backward = false;
  EXPECT_DOUBLE_EQ(traffic_of(facts, {4, 4, 4}).gather.bytes, 4 * psi * 3 / 4);
}

TEST(Estimate, ASharedCopyMovesNothing) {
  Facts facts = model(1);
  facts.shared_copy = true;
  EXPECT_EQ(traffic_of(facts, {4, 4, 4}).gather.bytes, 0);
  EXPECT_EQ(traffic_of(facts, {4, 4, 4}).gather.calls, 2);
}

TEST(Estimate, SecondsAreBytesOverTheLinkThatIsCrossed) {
  const Links links{.inside = 4e9, .between = 1e9, .inside_latency = 0, .between_latency = 1e-3, .memory = 32e9};
  // Update: 4 * 4 + 2 * 8 = 32 bytes for each of psi / 8 elements.
  const double update = psi / 8 / 1e9;
  const double hops = (2 * 4 * psi * 7 / 8 + 4 * psi * 7 / 8) / 1e9 + 33 * 1e-3;
  EXPECT_DOUBLE_EQ(moving_seconds(model(2), links, {8, 8, 8}), hops + update);
  const double inside = (2 * 4 * psi * 3 / 4 + 4 * psi * 3 / 4) / 4e9, between = 2 * 4 * psi / 8 / 1e9 + 11e-3;
  EXPECT_DOUBLE_EQ(moving_seconds(model(2), links, {4, 4, 4}), inside + between + 2 * update);
}

TEST(Estimate, InTwoLevelsEachElementCrossesOnce) {
  Facts facts = model(2);
  EXPECT_DOUBLE_EQ(traffic_of(facts, {8, 8, 8}).gather.across, 2 * 4 * psi * 7 / 8) << "flat: all of it is counted";
  facts.two_levels = true;
  // A piece of 1/8 goes to the counterpart on the other host; the rest is read inside.
  const Traffic full = traffic_of(facts, {8, 8, 8});
  EXPECT_DOUBLE_EQ(full.gather.bytes, 2 * 4 * psi * 7 / 8);
  EXPECT_DOUBLE_EQ(full.gather.across, 2 * 4 * psi / 8);
  EXPECT_DOUBLE_EQ(full.first_hop.across, 4 * psi / 8);
  const Traffic ddp = traffic_of(facts, {1, 1, 1});
  EXPECT_DOUBLE_EQ(ddp.third_hop.across, 2 * 4 * psi / 8);
  // One member on each host: there is nothing to share.
  const Traffic hybrid = traffic_of(facts, {4, 4, 4});
  EXPECT_EQ(hybrid.first_hop.across, 0);
  EXPECT_DOUBLE_EQ(hybrid.third_hop.across, hybrid.third_hop.bytes);
  const Traffic three = traffic_of(facts, {2, 4, 8});
  EXPECT_DOUBLE_EQ(three.refresh.bytes, 4 * psi / 2 * 3 / 4);
  EXPECT_DOUBLE_EQ(three.refresh.across, 4 * psi / 2 * 1 / 4) << "members 0 and 2 of each host: two of four";
  const Links links{.inside = 4e9, .between = 1e9, .inside_latency = 0, .between_latency = 1e-3, .memory = 32e9};
  const double across = 3 * 4 * psi / 8 / 1e9, inside = 3 * 4 * psi * 6 / 8 / 4e9, update = psi / 8 / 1e9;
  EXPECT_DOUBLE_EQ(moving_seconds(facts, links, {8, 8, 8}), across + inside + 33 * 1e-3 + update);
}

TEST(Estimate, FirstChoiceIsTheFastestThatFitsBesideActivations) {
  const Links slow_between{.inside = 1e11, .between = 1e8, .inside_latency = 0, .between_latency = 0, .memory = 1e12};
  Facts facts = model(2);
  facts.ranks_share_place = false;
  const FirstChoice roomy = first_choice(facts, slow_between, 1e9, 1e9, 0.1);
  EXPECT_EQ(roomy.degrees.parameters <= 4, true) << to_string(roomy.degrees) << ": gathers stay inside hosts";
  EXPECT_THAT(roomy.why, HasSubstr("fastest of what fits"));
  const double least = memory_of(facts, {8, 8, 8});
  EXPECT_EQ(first_choice(facts, slow_between, 2.5 * least, 2.5 * least, 0.1).degrees, (Degrees{8, 8, 8}));
  const FirstChoice tight = first_choice(facts, slow_between, least, least, 0.1);
  EXPECT_EQ(tight.degrees, (Degrees{8, 8, 8}));
  EXPECT_THAT(tight.why, HasSubstr("needs least"));
  EXPECT_EQ(tight.tiers, offload::Tiers());
}

TEST(Estimate, WhatLiesOnADiskTakesAWindowOfMemory) {
  using offload::Tier;
  constexpr double window = 48 << 20;
  Facts facts = model(1);
  facts.tiers = {.optimizer = Tier::disk};
  const RankMemory optimizer = memory_of_rank(facts, {4, 4, 4}, 0);
  EXPECT_DOUBLE_EQ(optimizer.masters, psi) << "fp32 masters of P = O are what is gathered";
  EXPECT_DOUBLE_EQ(optimizer.state, 0);
  EXPECT_DOUBLE_EQ(optimizer.gradients, psi);
  EXPECT_DOUBLE_EQ(optimizer.window, window);
  facts.tiers = {.parameters = Tier::disk, .gradients = Tier::disk, .optimizer = Tier::disk};
  const RankMemory nothing = memory_of_rank(facts, {1, 1, 1}, 0);
  EXPECT_DOUBLE_EQ(nothing.total(), window + 2 * 1'120'000) << "a unit is gathered into a buffer, whatever P";
  facts.tiers = {.optimizer = Tier::disk};
  facts.compute_bytes = 2;
  EXPECT_DOUBLE_EQ(memory_of_rank(facts, {4, 4, 4}, 0).masters, 0)
      << "masters of another precision are the optimizer's";
}

TEST(Estimate, FirstChoiceTakesADiskWhereNothingElseFits) {
  using offload::Tier;
  Facts facts = model(1);
  facts.parameters = 100'000'000;
  facts.root_unit = 10'000'000;
  facts.largest_unit = 9'000'000;
  const Links links{.inside = 1e10, .between = 1e9, .inside_latency = 0, .between_latency = 0, .memory = 1e10};
  const double whole = memory_of(facts, {4, 4, 4});
  const auto choose = [&](double available) { return first_choice(facts, links, available, available, 0, 50e6); };
  EXPECT_EQ(choose(whole + 60e6).tiers, offload::Tiers()) << "it fits";
  const FirstChoice optimizer = choose(whole - 100e6);
  EXPECT_EQ(optimizer.tiers, (offload::Tiers{.optimizer = Tier::disk}));
  EXPECT_EQ(optimizer.degrees, (Degrees{4, 4, 4}));
  EXPECT_THAT(optimizer.why, HasSubstr("optimizer on disk"));
  const offload::Tiers all{.parameters = Tier::disk, .gradients = Tier::disk, .optimizer = Tier::disk};
  EXPECT_EQ(choose(whole / 3).tiers, all);
  EXPECT_EQ(first_choice(facts, links, whole / 3, whole / 3, 0).tiers, offload::Tiers()) << "it may not";
  // What activations leave counts for the degrees, too.
  const double replicas = memory_of(facts, {1, 1, 1});
  const FirstChoice beside = first_choice(facts, links, 4 * replicas, 4 * replicas, 0, 3.1 * replicas);
  EXPECT_LE(memory_of(facts, beside.degrees), 0.9 * replicas) << to_string(beside.degrees);
  facts.shared_copy = true;
  facts.tiers = all;
  EXPECT_DOUBLE_EQ(memory_of(facts, {4, 4, 4}), 4 * memory_of_rank(facts, {4, 4, 4}, 0).total())
      << "what comes from a disk is no copy for all of a host";
  EXPECT_GT(memory_of_rank(facts, {4, 4, 4}, 0).gathered, 0);
}

}  // namespace
}  // namespace tesserae::cost
