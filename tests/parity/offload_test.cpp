// Training state on a disk: the same numbers to the last bit, whatever lies there, however little memory there is.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>
#include <optional>

#include "tesserae/offload/disk.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/optim/sgd.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"
#include "tests/os/scratch.h"
#include "tests/shard/net.h"

namespace tesserae::testing {
namespace {

using offload::Tier;
using offload::Tiers;
using shard::testing::batch_of;
using shard::testing::Net;
using shard::testing::NetOptions;

struct Case {
  std::string name;
  NetOptions net = {};
  mesh::Degrees degrees = {4, 4, 4};
  bool bf16 = false;
  int micro = 1;
  shard::Accumulation accumulation = shard::Accumulation::local;
  bool momentum = false;
  shard::CutBy cut_by = shard::CutBy::elements;
  bool keeps = false;  ///< the strategy frees nothing
  bool elastic = false;
  int steps = 20;
  int64_t memory = 0;
  std::optional<mesh::Degrees> turned_to = std::nullopt;  ///< half-way
  std::optional<Tiers> tiers_to = std::nullopt;
};

struct Outcome {
  std::vector<double> losses, norms;
  shard::testing::Values parameters;
  offload::DiskCounters counters;
};

Outcome train(comm::Fabric& fabric, const Case& what, const Tiers& tiers, const os::Path& folder) {
  Net net(what.net);
  shard::testing::fill_all(*net);
  shard::Options options;
  options.strategy = {what.degrees, !what.keeps, !what.keeps};
  if (what.bf16) options.precision = shard::Precision::bf16();
  options.accumulation = what.accumulation;
  options.cut_by = what.cut_by;
  options.elastic = what.elastic;
  options.tiers = tiers;
  std::shared_ptr<offload::Disk> disk;
  if (tiers.uses(Tier::disk) || what.tiers_to.value_or(Tiers()).uses(Tier::disk)) {
    disk = std::make_shared<offload::Disk>(offload::DiskOptions{folder, what.memory});
  }
  if (tiers.uses(Tier::disk)) options.disk = disk;
  shard::Sharded sharded = shard::shard_model(net, shard::testing::share(fabric), options);
  std::unique_ptr<optim::Optimizer> optimizer;
  if (what.momentum) {
    optimizer = std::make_unique<optim::Sgd>(sharded, optim::SgdOptions{.lr = 0.01, .momentum = 0.9});
  } else {
    optimizer = std::make_unique<optim::AdamW>(sharded, optim::AdamWOptions{.lr = 1e-3});
  }
  Outcome outcome;
  for (int step = 0; step < what.steps; ++step) {
    if (step == what.steps / 2 && (what.turned_to || what.tiers_to)) {
      const shard::Setting to{what.turned_to.value_or(what.degrees), what.tiers_to.value_or(tiers)};
      const shard::Resharding turn = sharded.turn(to, disk);
      EXPECT_EQ(turn.to, to);
      EXPECT_EQ(sharded.setting(), to);
      if (to.degrees == what.degrees) EXPECT_EQ(turn.bytes, 0) << "what stays with its owner does not travel";
    }
    double total = 0;
    for (int part = 0; part < what.micro; ++part) {
      const auto batch = batch_of(what.net, step, part * fabric.size() + fabric.rank(), what.micro * fabric.size(), 16);
      std::optional<shard::NoSync> scope;
      if (part + 1 < what.micro) scope.emplace(sharded.engine());
      at::Tensor loss = net(batch.tokens, batch.targets) / what.micro;
      loss.backward();
      total += loss.item<double>();
    }
    outcome.losses.push_back(sharded.sum_over_ranks(total));
    outcome.norms.push_back(optimizer->step({.clip_norm = 0.05, .keep_gradients = step % 2 == 0}).norm);
    optimizer->zero_grad();
  }
  sharded.visit_parameters(
      [&](const std::string& name, const at::Tensor& value) { outcome.parameters[name] = value.clone(); });
  if (disk == nullptr) return outcome;
  do {  // what is on its way out gives its memory back when it is there
    outcome.counters = disk->counters();
  } while (outcome.counters.writing > 0);
  return outcome;
}

class OffloadParity : public os::Scratch {
 protected:
  void expect_same(const Case& what, const std::vector<Tiers>& all, int ranks = 4) {
    Case in_memory = what;
    in_memory.tiers_to.reset();
    const Outcome expected = run(in_memory, {}, ranks);
    for (const Tiers& tiers : all) {
      const std::string name = cat(what.name, ", ", to_string(what.degrees), ", ", to_string(tiers));
      const Outcome actual = run(what, tiers, ranks);
      EXPECT_EQ(actual.losses, expected.losses) << name;
      EXPECT_EQ(actual.norms, expected.norms) << name;
      for (const auto& [parameter, value] : expected.parameters) {
        EXPECT_TRUE(at::equal(actual.parameters.at(parameter), value)) << name << ", " << parameter;
      }
      // Where masters of another dtype are what is gathered, there are no parameters beside the optimizer's state.
      const bool no_pieces = what.bf16 && what.degrees.parameters == what.degrees.optimizer;
      if (what.memory > 0 || (no_pieces && tiers == Tiers{.parameters = Tier::disk})) continue;
      EXPECT_GT(actual.counters.read, 0U) << name;
      EXPECT_GT(actual.counters.written, 0U) << name;
      EXPECT_EQ(actual.counters.resident, 0) << name;
    }
  }

 private:
  /// Of rank 0.
  Outcome run(const Case& what, const Tiers& tiers, int ranks) {
    Outcome outcome;
    comm::run_local(ranks, [&](comm::Fabric& fabric) {
      Outcome mine = train(fabric, what, tiers, folder_);
      if (fabric.rank() == 0) outcome = std::move(mine);
    });
    return outcome;
  }
};

const std::vector<Tiers> all_on_disk{{Tier::disk, Tier::disk, Tier::disk}};
const std::vector<Tiers> each_on_disk{{.parameters = Tier::disk}, {.gradients = Tier::disk}, {.optimizer = Tier::disk}};

TEST_F(OffloadParity, EveryDegreeOfFourRanks) {
  for (const mesh::Degrees& degrees : mesh::all_degrees(4)) {
    expect_same({.name = "plain", .degrees = degrees}, all_on_disk);
    expect_same({.name = "bf16", .degrees = degrees, .bf16 = true, .steps = 6}, each_on_disk);
  }
}

TEST_F(OffloadParity, EachStateByItself) {
  expect_same({.name = "plain"}, each_on_disk);
  expect_same({.name = "bf16", .degrees = {1, 2, 4}, .bf16 = true}, each_on_disk);
  expect_same({.name = "one rank", .degrees = {1, 1, 1}}, each_on_disk, 1);
}

TEST_F(OffloadParity, WhatModelsAndStepsDo) {
  const mesh::Degrees mixed{2, 2, 4};
  const NetOptions everything{.tied = true, .nested = true, .frozen_block = 1, .checkpoint = true};
  expect_same({.name = "tied, nested, frozen, recomputed", .net = everything, .degrees = mixed, .steps = 6},
              all_on_disk);
  expect_same({.name = "half frozen, unused", .net = {.frozen_matrix = true, .unused = true}, .steps = 6}, all_on_disk);
  expect_same({.name = "frozen, P = 1", .net = {.frozen_block = 1}, .degrees = {1, 1, 4}, .steps = 6}, all_on_disk);
  expect_same({.name = "twice", .net = {.twice = 1, .checkpoint = true}, .steps = 6}, all_on_disk);
  expect_same({.name = "accumulating", .degrees = mixed, .micro = 3, .steps = 6}, all_on_disk);
  expect_same(
      {.name = "two hops", .degrees = mixed, .micro = 3, .accumulation = shard::Accumulation::two_hop, .steps = 6},
      all_on_disk);
  expect_same({.name = "momentum", .momentum = true, .steps = 6}, all_on_disk);
  expect_same({.name = "by rows", .degrees = mixed, .cut_by = shard::CutBy::rows, .steps = 6}, all_on_disk);
  // Blocks of 3 rows over 4 owners: one of them has nothing of a matrix, and takes part in its refresh.
  const NetOptions few{.dimension = 3, .hidden = 5, .vocabulary = 3};
  for (const mesh::Degrees& degrees : {mesh::Degrees{2, 2, 4}, {1, 1, 4}}) {
    expect_same({.name = "few rows", .net = few, .degrees = degrees, .cut_by = shard::CutBy::rows, .steps = 6},
                all_on_disk);
  }
  expect_same({.name = "kept", .degrees = {1, 1, 1}, .keeps = true, .steps = 6}, all_on_disk);
  expect_same({.name = "elastic", .elastic = true, .steps = 6}, all_on_disk);
}

TEST_F(OffloadParity, ManyBlocks) {
  const NetOptions large{.dimension = 64, .hidden = 9000, .vocabulary = 20001, .blocks = 2};
  for (const int64_t memory : {int64_t{0}, int64_t{20} << 20, int64_t{1} << 30}) {
    expect_same({.name = "large", .net = large, .degrees = {1, 1, 1}, .steps = 3, .memory = memory}, all_on_disk, 1);
    expect_same({.name = "large", .net = large, .degrees = {2, 2, 2}, .bf16 = true, .steps = 3, .memory = memory},
                all_on_disk, 2);
  }
}

TEST_F(OffloadParity, TheDialIsTurned) {
  for (const mesh::Degrees to : {mesh::Degrees{4, 4, 4}, {1, 1, 4}, {2, 2, 2}, {1, 1, 1}}) {
    expect_same({.name = "turned", .degrees = {1, 2, 4}, .steps = 8, .turned_to = to}, all_on_disk);
    expect_same({.name = "turned, bf16", .degrees = {4, 4, 4}, .bf16 = true, .steps = 8, .turned_to = to}, all_on_disk);
  }
}

TEST_F(OffloadParity, TiersAreTurned) {
  const std::vector<Tiers> settings{
      {}, {.parameters = Tier::disk}, {.gradients = Tier::disk}, {.optimizer = Tier::disk}, all_on_disk.front()};
  const mesh::Degrees degrees[] = {{4, 4, 4}, {1, 1, 1}, {1, 2, 4}, {2, 2, 4}};
  size_t next = 0;
  for (const Tiers& from : settings) {
    for (const Tiers& to : settings) {
      if (from == to) continue;
      // Masters of bf16 belong to the optimizer, so its parameters alone have nothing on a disk.
      const bool bf16 = next % 3 == 2 && from != settings[1] && to != settings[1];
      Case what{
          .name = cat("to ", to_string(to)), .degrees = degrees[next % 4], .bf16 = bf16, .steps = 4, .tiers_to = to};
      if (next % 2 == 1) what.turned_to = degrees[(next + 2) % 4];  // both at once
      expect_same(what, {from});
      ++next;
    }
  }
}

TEST_F(OffloadParity, TiersAreTurnedInAnAccumulationAndBack) {
  const NetOptions everything{.tied = true, .nested = true, .frozen_block = 1, .checkpoint = true};
  for (const Tiers& from : {Tiers(), all_on_disk.front()}) {
    const Tiers to = from == Tiers() ? all_on_disk.front() : Tiers();
    expect_same({.name = "everything", .net = everything, .degrees = {2, 2, 4}, .steps = 6, .tiers_to = to}, {from});
    expect_same({.name = "accumulating",
                 .degrees = {1, 2, 4},
                 .micro = 3,
                 .accumulation = shard::Accumulation::two_hop,
                 .steps = 6,
                 .tiers_to = to},
                {from});
    expect_same({.name = "rows, kept",
                 .degrees = {2, 2, 4},
                 .cut_by = shard::CutBy::rows,
                 .keeps = true,
                 .steps = 6,
                 .tiers_to = to},
                {from});
  }
}

TEST_F(OffloadParity, ATurnThatCannotBeChangesNothing) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Net net{NetOptions()};
    shard::testing::fill_all(*net);
    shard::Options options;
    options.strategy = {{2, 2, 2}, true, true};
    shard::Sharded sharded = shard::shard_model(net, shard::testing::share(fabric), options);
    const shard::Setting before = sharded.setting();
    EXPECT_THROW(sharded.turn({{2, 2, 2}, all_on_disk.front()}), InvalidArgument) << "there is no disk";
    EXPECT_EQ(sharded.setting(), before);
    // One rank asks for something else.
    const Tiers other = fabric.rank() == 0 ? Tiers{.optimizer = Tier::disk} : Tiers();
    const auto disk = std::make_shared<offload::Disk>(offload::DiskOptions{folder_, 0});
    EXPECT_THROW(sharded.turn({{2, 2, 2}, other}, disk), comm::Mismatch);
    EXPECT_EQ(sharded.setting(), before);
    EXPECT_NO_THROW(sharded.turn({{1, 1, 1}, {.optimizer = Tier::disk}}, disk));
    EXPECT_EQ(sharded.turn(sharded.setting()).seconds, 0) << "it is there already";
  });
}

}  // namespace
}  // namespace tesserae::testing
