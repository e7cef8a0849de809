#include "tesserae/mesh/transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <random>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

struct Case {
  Layout from, to;
  int64_t elements, alignment;
};

std::string describe(const Case& c) {
  return cat(to_string(c.from.degrees()), " N=", c.from.ranks(), " -> ", to_string(c.to.degrees()), " N=", c.to.ranks(),
             ", ", c.elements, " elements aligned to ", c.alignment);
}

/// Elements of `wanted` that `have` lacks: what any plan must move at least.
int64_t lacking(const Range& wanted, const Range& have) {
  const int64_t common = std::min(wanted.end, have.end) - std::max(wanted.begin, have.begin);
  return wanted.size() - std::max<int64_t>(0, common);
}

/// Checks every promise of transfer.h for one pair of layouts. Returns what is broken, or nothing; plain comparisons
/// instead of EXPECT, for there are millions.
std::string broken_promise(const Case& c) {
  const int everyone = std::max(c.from.ranks(), c.to.ranks());
  std::map<std::pair<int, int>, std::vector<Move>> sent;  // (source, receiver)
  std::vector<int64_t> load(c.from.ranks());              // elements sent, by source
  std::vector<int64_t> demand(c.from.degrees().optimizer), largest(demand.size());
  for (int rank = 0; rank < everyone; ++rank) {
    const Range wanted = owned(c.to, c.elements, c.alignment, rank);
    const Range have = owned(c.from, c.elements, c.alignment, rank);
    int64_t next = wanted.begin, remote = 0;
    for (const Move& move : plan_transfer(c.from, c.to, c.elements, c.alignment, rank)) {
      if (!(move.source == move.destination) || move.source.empty()) return "ranges differ or are empty";
      if (move.destination.begin != next) return cat("rank ", rank, ": gap or overlap at ", next);
      next = move.destination.end;
      if (move.peer < 0 || move.peer >= c.from.ranks()) return cat("peer ", move.peer, " does not exist");
      const Range source = owned(c.from, c.elements, c.alignment, move.peer);
      if (move.source.begin < source.begin || move.source.end > source.end) return cat(move.peer, " has it not");
      if (move.peer == rank) continue;
      remote += move.source.size();
      sent[{move.peer, rank}].push_back(move);
      const int chunk = c.from.chunk(move.peer);
      load[move.peer] += move.source.size();
      demand[chunk] += move.source.size();
      largest[chunk] = std::max(largest[chunk], move.source.size());
    }
    if (!wanted.empty() && next != wanted.end) return cat("rank ", rank, ": ends at ", next, " of ", wanted.end);
    if (remote != lacking(wanted, have)) return cat("rank ", rank, " gets ", remote, ", not the lower bound");
  }
  for (const auto& [pair, moves] : sent) {
    if (moves.size() != 1) return cat(moves.size(), " messages from ", pair.first, " to ", pair.second);
  }
  for (int rank = 0; rank < everyone; ++rank) {
    for (const Move& move : plan_sends(c.from, c.to, c.elements, c.alignment, rank)) {
      const auto found = sent.find({rank, move.peer});
      if (found == sent.end()) return cat(rank, " sends to ", move.peer, ", who does not expect it");
      if (!(found->second[0].source == move.source)) return cat(rank, " sends ", move.peer, " another range");
      sent.erase(found);
    }
  }
  if (!sent.empty()) return cat(sent.begin()->first.first, " does not send to ", sent.begin()->first.second);
  for (int rank = 0; rank < c.from.ranks(); ++rank) {
    const int chunk = c.from.chunk(rank);
    const int64_t share = demand[chunk] / c.from.replicas() + 1;
    if (load[rank] > share + largest[chunk]) return cat(rank, " sends ", load[rank], ", its share is ", share);
  }
  return {};
}

TEST(Transfer, EveryPairOfLayoutsUpTo16Ranks) {
  int pairs = 0;
  for (int ranks = 1; ranks <= 16; ++ranks) {
    for (const Degrees& from : all_degrees(ranks)) {
      for (const Degrees& to : all_degrees(ranks)) {
        ++pairs;
        for (const int64_t elements : {0, 1, 7, 15, 16, 97, 1001}) {
          for (const int64_t alignment : {1, 4}) {
            const Case c{Layout(ranks, from), Layout(ranks, to), elements, alignment};
            ASSERT_EQ(broken_promise(c), "") << describe(c);
          }
        }
      }
    }
  }
  EXPECT_EQ(pairs, 4546) << "the squares of the numbers of triples p | g | o | N, summed";
}

TEST(Transfer, EveryPairOfLayoutsBetweenJobsOfDifferentSize) {
  for (const int from_ranks : {1, 2, 3, 4, 6, 8, 12}) {
    for (const int to_ranks : {1, 2, 3, 4, 5, 8, 12}) {
      if (from_ranks == to_ranks) continue;
      for (const Degrees& from : all_degrees(from_ranks)) {
        for (const Degrees& to : all_degrees(to_ranks)) {
          for (const int64_t elements : {0, 1, 7, 1001}) {
            for (const int64_t alignment : {1, 8}) {
              const Case c{Layout(from_ranks, from), Layout(to_ranks, to), elements, alignment};
              ASSERT_EQ(broken_promise(c), "") << describe(c);
            }
          }
        }
      }
    }
  }
}

TEST(Transfer, RandomLayoutsAndSizes) {
  std::mt19937_64 random(20);
  const auto random_layout = [&] {
    const int ranks = 1 + static_cast<int>(random() % 60);
    const std::vector<Degrees> valid = all_degrees(ranks);
    return Layout(ranks, valid[random() % valid.size()]);
  };
  for (int i = 0; i < 3000; ++i) {
    const Case c{random_layout(), random_layout(), static_cast<int64_t>(random() >> (24 + random() % 40)),
                 1 + static_cast<int64_t>(random() % 130)};
    ASSERT_EQ(broken_promise(c), "") << describe(c);
  }
}

TEST(Transfer, TheSameLayoutMovesNothing) {
  for (const Degrees& degrees : all_degrees(12)) {
    const Layout layout(12, degrees);
    for (int rank = 0; rank < 12; ++rank) {
      for (const Move& move : plan_transfer(layout, layout, 1001, 4, rank)) EXPECT_EQ(move.peer, rank);
      EXPECT_TRUE(plan_sends(layout, layout, 1001, 4, rank).empty());
    }
  }
}

TEST(Transfer, StaysInsideTheBlockOfALargerDegree) {
  // 4 replicas of an 8-way sharding, gathered to degree 2 or cut from it: everything is at hand in the same 8 ranks.
  const Layout wide(32, {8, 8, 8}), narrow(32, {2, 2, 2});
  for (int rank = 0; rank < 32; ++rank) {
    for (const Move& move : plan_transfer(wide, narrow, 1001, 4, rank)) EXPECT_EQ(move.peer / 8, rank / 8);
    for (const Move& move : plan_transfer(narrow, wide, 1001, 4, rank)) EXPECT_EQ(move.peer / 8, rank / 8);
  }
}

TEST(Transfer, NewcomersAreServedByAllReplicas) {
  // A job that grows from 4 to 8 ranks at degree 2: the old ranks keep what they have, each serves one newcomer.
  const Layout from(4, {2, 2, 2}), to(8, {2, 2, 2});
  std::vector<int> served(4);
  for (int rank = 0; rank < 8; ++rank) {
    const std::vector<Move> moves = plan_transfer(from, to, 100, 1, rank);
    ASSERT_EQ(moves.size(), 1u);
    if (rank < 4) {
      EXPECT_EQ(moves[0].peer, rank);
    } else {
      ++served[moves[0].peer];
    }
  }
  EXPECT_EQ(served, std::vector<int>(4, 1));
}

TEST(Transfer, RanksOutsideALayoutOwnNothing) {
  const Layout small(2, {2, 2, 2}), large(4, {4, 4, 4});
  EXPECT_TRUE(owned(small, 100, 1, 3).empty());
  EXPECT_TRUE(plan_transfer(large, small, 100, 1, 3).empty()) << "a rank that leaves needs nothing";
  EXPECT_FALSE(plan_sends(large, small, 100, 1, 3).empty()) << "but hands over what it has";
  EXPECT_TRUE(plan_sends(small, large, 100, 1, 3).empty());
  EXPECT_THROW(plan_transfer(small, large, 100, 1, -1), InvalidArgument);
  EXPECT_THROW(plan_sends(small, large, -1, 1, 0), InvalidArgument);
}

TEST(Transfer, ElementsBeyond32BitsAndTheirProductsDoNotOverflow) {
  const int64_t elements = (int64_t{1} << 60) + 12345;
  const Case c{Layout(48, {2, 4, 12}), Layout(64, {4, 8, 32}), elements, 64};
  EXPECT_EQ(broken_promise(c), "");
}

TEST(Transfer, PlansForSixteenThousandRanksAreQuick) {
  const int ranks = 16384;
  const auto start = std::chrono::steady_clock::now();
  int64_t moved = 0;
  const Degrees wide{64, 8192, 8192}, narrow{1, 1, 1}, whole{16384, 16384, 16384}, half{2, 2, 2};
  for (const auto& [from, to] : {std::pair{wide, narrow}, std::pair{narrow, wide}, std::pair{whole, narrow},
                                 std::pair{narrow, whole}, std::pair{half, wide}, std::pair{wide, half}}) {
    const Layout a(ranks, from), b(ranks, to);
    for (const int rank : {0, 5, 8191, 16383}) {
      for (const Move& move : plan_transfer(a, b, int64_t{1} << 40, 64, rank)) moved += move.source.size();
      for (const Move& move : plan_sends(a, b, int64_t{1} << 40, 64, rank)) moved += move.source.size();
    }
  }
  EXPECT_GT(moved, 0);
  // 48 plans. A quadratic planner needs minutes.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace tesserae::mesh
