#include "tesserae/cost/traced.h"

#include <gmock/gmock.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "tesserae/base/error.h"

namespace tesserae::cost {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

/// Two units of 30 and 40 elements, a root of 10.
json document() {
  const json pass = {{"peak", {{{"fixed", 140}, {"row", 1}}, {{"fixed", 100}, {"row", 50}}}},
                     {"blocks", {{"fixed", 0}, {"row", 20}}},
                     {"products",
                      {{{"multiplications", 1000}, {"calls", 3}, {"batched", false}},
                       {{"multiplications", 8}, {"calls", 6}, {"batched", true}}}},
                     {"attention", {{{"tokens", 4}, {"operations", 600}}}}};
  json recomputed = pass;
  recomputed["peak"][1]["row"] = 30;
  recomputed["blocks"]["row"] = 5;
  return {{"traced", 3},
          {"name", "Net"},
          {"dtype", "bf16"},
          {"parameters", 80},
          {"trained", 60},
          {"units", {30, 40}},
          {"trained_units", {30, 25}},
          {"root", 10},
          {"trained_root", 5},
          {"process", 5},
          {"kept", pass},
          {"recomputed", recomputed}};
}

Machine machine() {
  Machine machine;
  machine.name = "small";
  Machine::Compute& rates = machine.compute["bf16"];
  rates.products = Curve({{2, 100}, {10, 1000}, {20, 2000}});
  rates.attention = Curve(300);
  rates.activations = Curve(10);
  rates.loss = Curve(5);
  return machine;
}

TEST(Traced, SizesAreThoseOfItsUnits) {
  const Traced traced(document());
  Facts facts;
  traced.set_sizes(facts, 1, 1);
  EXPECT_EQ(facts.parameters, 80);
  EXPECT_EQ(facts.trained, 0.75);
  EXPECT_EQ(facts.root_unit, 10);
  EXPECT_EQ(facts.largest_unit, 40);
  EXPECT_EQ(facts.trained_root, 0.5);
  EXPECT_EQ(facts.trained_unit, 0.75) << "the other unit has more that is trained";
  EXPECT_EQ(facts.units, 3);
  EXPECT_TRUE(traced.can_split(1) && traced.can_cut(1));
  EXPECT_FALSE(traced.can_split(2) || traced.can_cut(2));
  EXPECT_THAT(traced.text(), HasSubstr("Net, traced in bf16, in 3 units; 20 of them are frozen"));
}

TEST(Traced, ActivationsGrowWithRows) {
  const Traced traced(document());
  const Activations kept = traced.activations({.micro_batch = 4});
  EXPECT_EQ(kept.total(), 100 + 4 * 50);
  EXPECT_EQ(kept.blocks, 4 * 20);
  EXPECT_EQ(traced.activations({.micro_batch = 4, .recompute = true}).total(), 100 + 4 * 30);
}

TEST(Traced, TimeByHand) {
  const Traced traced(document());
  const ComputeTime one = traced.compute_time({.micro_batch = 1}, machine(), "bf16");
  EXPECT_DOUBLE_EQ(one.products, 2.0 * 1000 * 3 / 1000 + 2.0 * 8 * 6 / 100);
  EXPECT_DOUBLE_EQ(one.attention, 600.0 / 300);
  EXPECT_DOUBLE_EQ(one.activations, 20.0 / 10);
  EXPECT_DOUBLE_EQ(one.head, (150.0 - 20) / 5);
  // Eight rows: a product that is twice as large each way, and eight times as many of those that are batched.
  const ComputeTime eight = traced.compute_time({.micro_batch = 8}, machine(), "bf16");
  EXPECT_NEAR(eight.products, 2.0 * 8000 * 3 / 2000 + 2.0 * 8 * 48 / 100, 1e-9);
  EXPECT_DOUBLE_EQ(eight.attention, 8 * one.attention);
  EXPECT_DOUBLE_EQ(traced.compute_time({.micro_batch = 1, .recompute = true}, machine(), "bf16").activations,
                   4.0 / 3 * one.activations);
  Machine whole = machine();
  whole.compute["bf16"].weights = Curve(40);
  whole.compute["bf16"].share_more = 0.5;
  const ComputeTime more = traced.compute_time({.micro_batch = 1, .compute_bytes = 2}, whole, "bf16");
  EXPECT_DOUBLE_EQ(more.products, one.products + 80 * 2 / 40.0);
  EXPECT_DOUBLE_EQ(more.total(), 1.5 * (one.total() + 80 * 2 / 40.0));
}

TEST(Traced, RefusesWhatNobodyHasTraced) {
  const auto expect_refused = [](const std::function<void(json&)>& spoil, const std::string& what) {
    json spoiled = document();
    spoil(spoiled);
    try {
      const Traced traced(spoiled);
      ADD_FAILURE() << "taken: " << spoiled;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr(what));
    }
  };
  expect_refused([](json& d) { d = json::array(); }, "not what `tesserae plan --script` traces");
  expect_refused([](json& d) { d["traced"] = 2; }, "not what `tesserae plan --script` traces, format 3");
  expect_refused([](json& d) { d.erase("kept"); }, "kept");
  expect_refused([](json& d) { d["name"] = 5; }, "not what");
  expect_refused([](json& d) { d["root"] = 11; },
                 "11 in the root and 70 in 2 units (trained: 5 and 55 in 2): that cannot be");
  expect_refused([](json& d) { d["trained"] = 0; }, "(0 trained)");
  expect_refused([](json& d) { d["kept"]["peak"][0]["row"] = -1; }, "row is -1");
  expect_refused([](json& d) { d["trained_root"] = 4; }, "that cannot be");
  expect_refused([](json& d) { d["trained_units"] = {55}; }, "that cannot be");
  expect_refused([](json& d) { d["trained_units"] = {31, 24}; }, "that cannot be");
  expect_refused([](json& d) { d["units"] = {-30, 100}; }, "that cannot be");
}

}  // namespace
}  // namespace tesserae::cost
