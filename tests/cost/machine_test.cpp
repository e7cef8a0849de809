#include "tesserae/cost/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/cost/step_time.h"

namespace tesserae::cost {
namespace {

using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

Machine measured() {
  Machine machine;
  machine.name = "bench";
  machine.measured = true;
  machine.per_host = 2;
  machine.shares_place = machine.shared_copy = true;
  machine.compute["fp32"] = {.products = Curve({{.size = 8, .rate = 100}, {.size = 64, .rate = 1000}}),
                             .weights = {},
                             .attention = Curve(50),
                             .activations = Curve(20),
                             .loss = Curve(10),
                             .process = 1e6,
                             .workspaces = {.bytes = Curve(7), .rows = 3, .depth = 5}};
  machine.optimizer = Curve(400);
  machine.reduce = Curve(5);
  machine.links = {.inside = 100, .between = 10, .inside_latency = 3, .between_latency = 7, .memory = 1000};
  machine.overlap = 0.5;
  machine.meeting = 0.25;
  return machine;
}

TEST(Machine, IsReadAsItWasWritten) {
  EXPECT_EQ(machine_from(to_json(measured())), measured());
  for (const Machine& sheet : data_sheets()) EXPECT_EQ(machine_from(to_json(sheet)), sheet) << sheet.name;
}

TEST(Machine, RefusesWhatIsNone) {
  EXPECT_THAT(refusal([] { machine_from(nlohmann::json::object()); }), HasSubstr("not the numbers of a machine"));
  EXPECT_THAT(refusal([] { machine_from({{"machine", 99}}); }), HasSubstr("format 99"));
  auto without = nlohmann::json::parse(to_json(measured()).dump());
  without["compute"]["fp32"].erase("loss");
  EXPECT_THAT(refusal([&] { machine_from(without); }), HasSubstr("loss"));
  const auto changed = [](const char* name, const nlohmann::json& value) {
    auto document = nlohmann::json::parse(to_json(measured()).dump());
    document[nlohmann::json::json_pointer(name)] = value;
    return refusal([&] { machine_from(document); });
  };
  EXPECT_EQ(changed("/overlap", 1), "");
  EXPECT_THAT(changed("/overlap", 5), HasSubstr("overlap is 5"));
  EXPECT_THAT(changed("/meeting", -1), HasSubstr("meeting is -1"));
  EXPECT_THAT(changed("/compute/fp32/process", -1e9), HasSubstr("process is"));
  EXPECT_THAT(changed("/compute/fp32/workspaces/depth", -1), HasSubstr("workspaces.depth is"));
  EXPECT_THAT(changed("/links/between", 0), HasSubstr("links.between is 0"));
  EXPECT_THAT(changed("/compute/fp32/products", nlohmann::json::array()), HasSubstr("no rates of products in fp32"));
  EXPECT_THAT(refusal([] { (void)measured().of("bf16"); }), HasSubstr("only in fp32; measure it"));
}

TEST(Machine, DataSheetsAreFoundByTheirShortNames) {
  EXPECT_EQ(data_sheet("H100").name, data_sheet("h100").name);
  EXPECT_GT(data_sheet("b200").of("bf16").products.at(1e4), data_sheet("h100").of("bf16").products.at(1e4));
  EXPECT_THAT(refusal([] { (void)data_sheet("h1000"); }), HasSubstr("there are a100, h100, h200, b200, trn2"));
  for (const Machine& sheet : data_sheets()) EXPECT_FALSE(sheet.measured) << sheet.name;
}

TEST(StepTime, OfABlockByHand) {
  const model::GptConfig model{.vocabulary = 64, .dimension = 64, .layers = 2, .heads = 1, .feed_forward = 64};
  const Execution run{.sequence = 64, .micro_batch = 1, .compute_bytes = 4};
  const ComputeTime time = compute_time(model, run, measured(), "fp32");
  // Seven products of 64 x 64 x 64 a block, whose cube root is 64, forward and twice backward.
  EXPECT_DOUBLE_EQ(time.products, 2 * 7 * 3 * 2 * 64.0 * 64 * 64 / 1000);
  EXPECT_DOUBLE_EQ(time.attention, 2 * 3 * 2 * 64.0 * 64 * 64 / 50);
  EXPECT_DOUBLE_EQ(time.activations, kept_by_blocks(model, run) / 20);
  EXPECT_DOUBLE_EQ(time.head, 3 * 2 * 64.0 * 64 * 64 / 1000 + activations_of(model, run).head / 10);
  Machine whole = measured();  // of whose steps more is known than of their pieces
  whole.compute["fp32"].weights = Curve(7);
  whole.compute["fp32"].share_more = 0.5;
  const ComputeTime more = compute_time(model, run, whole, "fp32");
  EXPECT_DOUBLE_EQ(more.products, time.products + 4.0 * static_cast<double>(part_sizes(model, 1).total) / 7);
  EXPECT_DOUBLE_EQ(more.total(), 1.5 * (more.products + time.attention + time.activations + time.head));
  Execution again = run;
  again.recompute = true;
  EXPECT_DOUBLE_EQ(compute_time(model, again, measured(), "fp32").products, time.products * 4 / 3);
}

TEST(StepTime, WhatMovesAndWhatOfItShows) {
  Facts facts;
  facts.host_of = {0, 0};
  facts.parameters = 1000;
  facts.root_unit = facts.largest_unit = 500;
  facts.units = 2;
  facts.shared_copy = true;
  const MovingTime time = moving_time(facts, measured(), {2, 2, 2});
  EXPECT_DOUBLE_EQ(time.gather, 0) << "one copy: its meetings are counted below";
  EXPECT_DOUBLE_EQ(time.reduce, 4 * 1000 / 2 / 5.0);
  EXPECT_DOUBLE_EQ(time.optimizer, (4 * 4 + 2 * 8) * 1000 / 2 / 400.0);
  EXPECT_DOUBLE_EQ(time.meetings, 4 * 0.25);
  EXPECT_DOUBLE_EQ(time.adding, 0) << "the first gradients are computed where they are reduced";
  facts.micro_batches = 3;
  EXPECT_DOUBLE_EQ(moving_time(facts, measured(), {2, 2, 2}).adding, 2 * (3 * 4) * 1000 / 400.0);
  facts.compute_bytes = 2;
  EXPECT_DOUBLE_EQ(moving_time(facts, measured(), {2, 2, 2}).adding, (3 * (2 + 4) + 2 * 4) * 1000 / 400.0);
}

TEST(StepTime, WhatHidesWhatMoves) {
  const Machine half = measured();  // of what could be hidden
  EXPECT_DOUBLE_EQ(exposed_time({.gather = 40}, {.computed = 100}, half), 20);
  EXPECT_DOUBLE_EQ(exposed_time({.gather = 100}, {.computed = 40}, half), 80);
  EXPECT_DOUBLE_EQ(exposed_time({.reduce = 100}, {.computed = 90}, half), 100 - 30);
  EXPECT_DOUBLE_EQ(exposed_time({.refresh = 100}, {.computed = 90}, half), 100 - 15);
  EXPECT_DOUBLE_EQ(exposed_time({.gather = 90, .reduce = 90, .refresh = 90}, {.computed = 90}, half), 270 - 45);
  EXPECT_DOUBLE_EQ(exposed_time({.reduce = 100}, {.computed = 90, .micro_batches = 3}, half), 100 - 10);
  EXPECT_DOUBLE_EQ(exposed_time({.reduce = 100}, {.computed = 90, .micro_batches = 3, .reducing = 3}, half), 100 - 30);
  EXPECT_DOUBLE_EQ(exposed_time({.reduce = 40, .refresh = 20}, {.computed = 90, .root = 0.5}, half), 60 - 15);
}

}  // namespace
}  // namespace tesserae::cost
