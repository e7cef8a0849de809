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
  mesh::Degrees turned_to = {};  ///< half-way, unless all are zero
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
  if (tiers.uses(Tier::disk)) {
    options.disk = std::make_shared<offload::Disk>(offload::DiskOptions{folder, what.memory});
  }
  shard::Sharded sharded = shard::shard_model(net, shard::testing::share(fabric), options);
  std::unique_ptr<optim::Optimizer> optimizer;
  if (what.momentum) {
    optimizer = std::make_unique<optim::Sgd>(sharded, optim::SgdOptions{.lr = 0.01, .momentum = 0.9});
  } else {
    optimizer = std::make_unique<optim::AdamW>(sharded, optim::AdamWOptions{.lr = 1e-3});
  }
  Outcome outcome;
  for (int step = 0; step < what.steps; ++step) {
    if (what.turned_to.optimizer > 0 && step == what.steps / 2) sharded.reshard(what.turned_to);
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
  if (options.disk == nullptr) return outcome;
  do {  // what is on its way out gives its memory back when it is there
    outcome.counters = options.disk->counters();
  } while (outcome.counters.writing > 0);
  return outcome;
}

class OffloadParity : public os::Scratch {
 protected:
  void expect_same(const Case& what, const std::vector<Tiers>& all, int ranks = 4) {
    const Outcome expected = run(what, {}, ranks);
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

}  // namespace
}  // namespace tesserae::testing
