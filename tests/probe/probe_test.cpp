#include "tesserae/probe/probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/os/clock.h"
#include "tesserae/plan/plan.h"
#include "tesserae/probe/measure.h"

namespace tesserae::probe {
namespace {

std::shared_ptr<comm::Fabric> borrowed(comm::Fabric& fabric) {
  return {&fabric, [](comm::Fabric*) {}};
}

// What is measured is checked for order, not for speed: machines differ, and are disturbed.
TEST(Probe, MeasuresWhatAPlanNeeds) {
  std::vector<cost::Machine> of_rank(2);
  comm::run_local(2, [&](comm::Fabric& fabric) {
    std::vector<std::string> told;
    const cost::Machine machine =
        probe(borrowed(fabric),
              {.name = "here", .dtypes = {"fp32", "bf16"}, .window = 1e-4, .say = [&](const std::string& what) {
                 told.push_back(what);
               }});
    EXPECT_EQ(machine.name, "here");
    EXPECT_TRUE(machine.measured);
    EXPECT_TRUE(machine.shares_place);
    EXPECT_EQ(machine.per_host, 2);
    EXPECT_GT(machine.memory, 1e8);
    for (const char* dtype : {"fp32", "bf16"}) {
      const cost::Machine::Compute& rates = machine.of(dtype);
      EXPECT_GT(rates.process, 1e6) << dtype;
      EXPECT_GE(rates.workspaces.bytes.points().size(), 3u) << dtype;
      EXPECT_GE(rates.workspaces.rows, 64) << dtype;
      EXPECT_GE(rates.workspaces.depth, 256) << dtype;
      for (const cost::Curve* curve : {&rates.products, &rates.attention, &rates.activations, &rates.loss}) {
        EXPECT_GE(curve->points().size(), 4u) << dtype;
      }
      EXPECT_GE(rates.weights.points().size(), 3u) << dtype;
      EXPECT_GE(rates.for_parameters, 0) << dtype;
    }
    for (const cost::Curve* curve : {&machine.optimizer, &machine.gather, &machine.reduce, &machine.all_reduce}) {
      EXPECT_GE(curve->points().size(), 4u);
    }
    EXPECT_GE(machine.overlap, 0);
    EXPECT_LE(machine.overlap, 1);
    EXPECT_GE(machine.meeting, 0);
    EXPECT_THAT(told, testing::Contains("attention in bf16"));

    EXPECT_FALSE(machine.knows_network);
    of_rank[static_cast<size_t>(fabric.rank())] = machine;

    // A plan can be made from them.
    EXPECT_EQ(cost::machine_from(cost::to_json(machine)), machine);
    const plan::Training training{.batch = 4, .run = {.sequence = 64, .compute_bytes = 4}, .dtype = "fp32"};
    const auto entries =
        plan::make_plan(cost::Transformer({.vocabulary = 64, .dimension = 64, .layers = 2, .heads = 2}), training,
                        {.devices = 2, .per_host = 2, .machine = machine});
    EXPECT_GT(entries.front().seconds(), 0);
    EXPECT_GT(entries.front().memory(), 2 * machine.of("fp32").process);
  });
  EXPECT_EQ(of_rank[0], of_rank[1]);
}

// Ranks that meet take longer than a small product: what counts is what each does in its own time.
TEST(Probe, EachRankRepeatsItsWorkByItsOwnClock) {
  std::array<int, 2> calls{};
  comm::run_local(2, [&](comm::Fabric& fabric) {
    int& own = calls[static_cast<size_t>(fabric.rank())];
    const auto slower_on_rank_0 = [&] {
      ++own;
      os::sleep_for(std::chrono::milliseconds(fabric.rank() == 0 ? 80 : 1));
    };
    const double seconds = seconds_of(fabric, 0.05, slower_on_rank_0);
    EXPECT_GE(seconds, 2 / (1 / 1e-3 + 1 / 80e-3)) << "what both do in a second, of two";
    EXPECT_LT(seconds, 80e-3);
  });
  EXPECT_GE(calls[0], 5) << "five windows";
  EXPECT_GT(calls[1], calls[0]);
}

TEST(Probe, WhatRanksDoTogetherTheyDoEquallyOften) {
  std::array<int, 2> calls{};
  comm::run_local(2, [&](comm::Fabric& fabric) {
    const double seconds = seconds_together(fabric, 0.01, [&] {
      ++calls[static_cast<size_t>(fabric.rank())];
      fabric.everyone().barrier();
    });
    EXPECT_GT(seconds, 0);
  });
  EXPECT_EQ(calls[0], calls[1]);
}

TEST(Probe, RefusesADtypeThatNobodyTrainsIn) {
  comm::run_local(
      1, [](comm::Fabric& fabric) { EXPECT_THROW(probe(borrowed(fabric), {.dtypes = {"fp8"}}), InvalidArgument); });
}

}  // namespace
}  // namespace tesserae::probe
