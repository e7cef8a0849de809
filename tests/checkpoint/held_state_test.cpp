#include "tesserae/checkpoint/held_state.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/world.h"
#include "tests/os/scratch.h"
#include "tests/support/ranks.h"

// What ranks that are left hold together becomes a checkpoint: real processes, of which some come with nothing.

namespace tesserae::checkpoint {
namespace {

constexpr int held_ranks = 4;

/// Of a tensor of ten elements, which is padded to twelve, chunk `index` of two; its numbers are those of `step`.
Piece chunk(const std::string& name, int64_t step, int index, bool written) {
  at::Tensor data = at::full({6}, -1, at::kFloat);
  const int64_t begin = index * 6, there = index == 0 ? 6 : 4;
  data.narrow(0, 0, there).copy_(at::arange(begin, begin + there) + 100 * step);
  return {.name = name, .shape = {2, 5}, .elements = {begin, begin + 6}, .data = data, .written = written};
}

/// Two replicas, of two chunks each; the second chunk alone has the bias.
State state_of(int rank, int64_t step) {
  const bool first = rank / 2 == 0;
  State state{.step = step, .layout = {held_ranks, {2, 2, 2}}, .pieces = {}, .training = {{"by", rank}}};
  state.pieces = {chunk("model/weight", step, rank % 2, first),
                  chunk("optimizer/exp_avg/weight", step, rank % 2, first),
                  replicated("buffer/count", at::full({1}, step), rank)};
  state.pieces.back().changes_in_forward = true;
  state.pieces.push_back(replicated("buffer/empty", at::zeros({0}), rank));
  const int64_t held = rank % 2;  // elements
  state.pieces.push_back({.name = "model/bias",
                          .shape = {1},
                          .elements = {0, held},
                          .data = at::full({held}, static_cast<double>(step)),
                          .written = first && held > 0});
  return state;
}

std::vector<Piece> own_of(int rank) {
  return {replicated("rank/" + std::to_string(rank) + "/words", at::full({3}, rank, at::kLong), 0)};
}

/// Whether the ranks save `expected`, holding the steps of `holds`, "-" being none.
void expect_saved(const std::shared_ptr<comm::Fabric>& fabric, const os::Path& folder,
                  const std::vector<std::string>& holds, int64_t expected) {
  const int rank = fabric->rank();
  const std::string& own = holds.at(static_cast<size_t>(rank));
  State live = state_of(rank, own == "-" ? 0 : std::stoi(own));
  const HeldState held(*fabric, live, own_of(rank));
  live.pieces[2].data.fill_(-7);  // a buffer, which forward changes
  const auto saved = save_held(fabric, own == "-" ? nullptr : &held, folder, 2);
  ASSERT_EQ(saved.value_or(-1), expected);
  if (!saved) return;

  State found = state_of(rank, 0);
  for (int other = 0; other < held_ranks; ++other) found.pieces.push_back(own_of(other).front());
  for (Piece& piece : found.pieces) piece.data = at::full_like(piece.data, -2);
  const auto loaded = load_newest(*fabric, folder, [&](const Checkpoint& from) { load(from, found.pieces); });
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->step(), expected);
  EXPECT_TRUE(loaded->manifest().training.contains("by"));
  EXPECT_NE(loaded->manifest().find("buffer/empty"), nullptr);
  State right = state_of(rank, expected);
  for (int other = 0; other < held_ranks; ++other) right.pieces.push_back(own_of(other).front());
  for (size_t i = 0; i < right.pieces.size(); ++i) {
    const Piece& piece = right.pieces[i];
    const int64_t there = stored_elements(piece).size();
    EXPECT_TRUE(found.pieces[i].data.narrow(0, 0, there).equal(piece.data.narrow(0, 0, there)))
        << piece.name << " " << found.pieces[i].data;
  }
}

/// args: the folder, ranks of a host; for each case what the ranks hold, and the step that is to be saved, -1 for none.
RANK_MAIN(saves_what_is_held) {
  const mesh::World world = mesh::World::from_environment();
  comm::FabricOptions options;
  options.host = std::to_string(world.rank() / std::stoi(args.at(1)));
  const auto fabric = comm::Fabric::connect(world, options);
  for (size_t i = 2; i < args.size(); i += held_ranks + 1) {
    const auto begin = args.begin() + static_cast<std::ptrdiff_t>(i);
    SCOPED_TRACE(i);
    expect_saved(fabric, args.at(0), {begin, begin + held_ranks}, std::stoi(*(begin + held_ranks)));
  }
}

class HeldStates : public os::Scratch {
 protected:
  void expect(testing::RankArgs cases, int ranks_of_a_host = held_ranks) {
    cases.insert(cases.begin(), {folder_.native(), std::to_string(ranks_of_a_host)});
    const auto results = testing::run_ranks("saves_what_is_held", held_ranks, cases);
    EXPECT_TRUE(results.all_succeeded()) << results.text();
  }
};

TEST_F(HeldStates, OfALostRankAReplicaHasTheRest) {
  expect({"-", "1", "1", "1", "1",  //
          "2", "-", "2", "2", "2",  //
          "3", "3", "-", "3", "3",  //
          "4", "4", "4", "-", "4"});
}

TEST_F(HeldStates, WhatNobodyHoldsAnyMoreIsMissed) {
  expect({"5", "-", "5", "-", "-1",    // both with the second chunk, and all that have a bias
          "-", "-", "5", "5", "-1"});  // all of the state is there, but not the random numbers of the first
}

TEST_F(HeldStates, OfALostHostAnotherHasTheRest) {
  expect({"-", "-", "1", "1", "1",  //
          "2", "2", "-", "-", "2",  //
          "-", "3", "3", "3", "3",  //
          "-", "4", "-", "4", "-1"},
         2);
}

TEST_F(HeldStates, TheNewestStepThatIsWholeCounts) {
  expect({"6", "5", "5", "5", "5",   // the random numbers of the first are with the second
          "8", "7", "7", "8", "-1",  // no step has the random numbers of all
          "9", "9", "9", "8", "9"});
}

TEST_F(HeldStates, WhatTheFolderHasIsNotSavedAgain) {
  expect({"5", "5", "5", "5", "5",   //
          "5", "5", "-", "5", "-1",  //
          "6", "6", "-", "6", "6"});
}

}  // namespace
}  // namespace tesserae::checkpoint
