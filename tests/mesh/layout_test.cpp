#include "tesserae/mesh/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int most_ranks = 24;

std::vector<Layout> all_layouts(int up_to) {
  std::vector<Layout> layouts;
  for (int ranks = 1; ranks <= up_to; ++ranks) {
    for (const Degrees& degrees : all_degrees(ranks)) layouts.emplace_back(ranks, degrees);
  }
  return layouts;
}

std::string describe(const Layout& layout) {
  return cat(to_string(layout.degrees()), " N=", layout.ranks());
}

std::string error_of(int ranks, Degrees degrees) {
  try {
    Layout(ranks, degrees);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(Layout, KnowsEveryValidTriple) {
  EXPECT_THAT(all_degrees(1), ElementsAre(Degrees{1, 1, 1}));
  EXPECT_EQ(all_degrees(4).size(), 10u);
  EXPECT_EQ(all_layouts(most_ranks).size(), 408u);
  for (int ranks = 1; ranks <= most_ranks; ++ranks) {
    std::vector<Degrees> brute;
    for (int p = 1; p <= ranks; ++p) {
      for (int g = p; g <= ranks; g += p) {
        for (int o = g; o <= ranks; o += g) {
          if (ranks % o == 0) brute.push_back({p, g, o});
        }
      }
    }
    EXPECT_EQ(all_degrees(ranks), brute) << ranks;
  }
  EXPECT_THROW(all_degrees(0), InvalidArgument);
}

TEST(Layout, AcceptsExactlyTheValidTriples) {
  for (int ranks = 1; ranks <= 12; ++ranks) {
    const std::vector<Degrees> valid = all_degrees(ranks);
    for (int p = 0; p <= ranks + 1; ++p) {
      for (int g = 0; g <= ranks + 1; ++g) {
        for (int o = 0; o <= ranks + 1; ++o) {
          const Degrees degrees{p, g, o};
          const bool is_valid = std::ranges::find(valid, degrees) != valid.end();
          EXPECT_EQ(error_of(ranks, degrees) == "no error", is_valid) << to_string(degrees) << " N=" << ranks;
        }
      }
    }
  }
}

TEST(Layout, ErrorsNameTheNearestValidTriples) {
  EXPECT_EQ(error_of(4, {3, 4, 4}),
            "[Layout] P=3 does not divide G=4 (P=3 G=4 O=4 N=4; each must divide the next); "
            "nearest valid: P=2 G=4 O=4, P=4 G=4 O=4");
  EXPECT_THAT(error_of(8, {2, 2, 5}), AllOf(HasSubstr("G=2 does not divide O=5"), HasSubstr("P=2 G=2 O=4")));
  EXPECT_THAT(error_of(8, {4, 4, 16}), AllOf(HasSubstr("O=16 does not divide the number of ranks N=8"),
                                             HasSubstr("nearest valid: P=4 G=4 O=8")));
  EXPECT_THAT(error_of(8, {0, 4, 8}), AllOf(HasSubstr("P=0 is not positive"), HasSubstr("P=1 G=4 O=8")));
  EXPECT_THAT(error_of(8, {-2147483647 - 1, 2147483647, 8}), HasSubstr("nearest valid: P=1 G=8 O=8"));
  EXPECT_THAT(error_of(0, {1, 1, 1}), AllOf(HasSubstr("N=0 is not positive"), Not(HasSubstr("nearest"))));
}

TEST(Layout, DegreesForFewerRanksAreValidThere) {
  for (int ranks = 1; ranks <= most_ranks; ++ranks) {
    for (int fewer = 1; fewer <= ranks; ++fewer) {
      if (ranks % fewer != 0) continue;
      for (const Degrees& degrees : all_degrees(ranks)) {
        const Degrees here = limited(degrees, fewer);
        EXPECT_EQ(error_of(fewer, here), "no error") << describe({ranks, degrees}) << " on " << fewer;
        EXPECT_EQ(limited(here, fewer), here);
        if (fewer % degrees.optimizer == 0) {
          EXPECT_EQ(here, degrees);
        }
      }
      EXPECT_EQ(limited({ranks, ranks, ranks}, fewer), (Degrees{fewer, fewer, fewer}));
    }
  }
  EXPECT_EQ(limited({1, 6, 12}, 4), (Degrees{1, 2, 4}));
}

TEST(Layout, FollowsTheOwnershipRule) {
  for (const Layout& layout : all_layouts(most_ranks)) {
    const auto [P, G, O] = layout.degrees();
    for (int r = 0; r < layout.ranks(); ++r) {
      const int p = r % P, g = r % G / P, o = r % O / G;
      EXPECT_EQ(layout.parameter_piece(r), p);
      EXPECT_EQ(layout.gradient_piece(r), p * (G / P) + g);
      EXPECT_EQ(layout.chunk(r), (p * (G / P) + g) * (O / G) + o);
      EXPECT_EQ(layout.replica(r), r / O);
      EXPECT_EQ(layout.owner(layout.chunk(r), layout.replica(r)), r);
    }
  }
  const Layout layout(16, {2, 4, 8});
  EXPECT_EQ(layout.replicas(), 2);
  std::vector<int> chunks(8);
  for (int r = 0; r < 8; ++r) chunks[r] = layout.chunk(r);
  EXPECT_THAT(chunks, ElementsAre(0, 4, 2, 6, 1, 5, 3, 7));
}

TEST(Layout, PiecesNestInContiguousRuns) {
  for (const Layout& layout : all_layouts(most_ranks)) {
    const auto [P, G, O] = layout.degrees();
    for (int r = 0; r < layout.ranks(); ++r) {
      EXPECT_EQ(layout.gradient_piece(r) / (G / P), layout.parameter_piece(r)) << describe(layout);
      EXPECT_EQ(layout.chunk(r) / (O / G), layout.gradient_piece(r)) << describe(layout);
    }
  }
}

/// Member i of every group works on the i-th of equal slices that follow one another in memory, and is in that group.
void check_group(const Layout& layout, int rank, const std::vector<int>& group, size_t size,
                 const std::function<int(int)>& first_chunk, int stride) {
  ASSERT_EQ(group.size(), size) << describe(layout);
  EXPECT_NE(std::ranges::find(group, rank), group.end()) << describe(layout);
  for (size_t i = 0; i < group.size(); ++i) {
    EXPECT_EQ(first_chunk(group[i]), first_chunk(group[0]) + static_cast<int>(i) * stride) << describe(layout);
  }
}

TEST(Layout, GroupsListTheirMembersInOrderOfContiguousPieces) {
  for (const Layout& layout : all_layouts(most_ranks)) {
    const auto [P, G, O] = layout.degrees();
    const auto chunk = [&](int r) { return layout.chunk(r); };
    const auto gradient = [&, G = G, O = O](int r) { return layout.gradient_piece(r) * (O / G); };
    const auto parameter = [&, P = P, O = O](int r) { return layout.parameter_piece(r) * (O / P); };
    for (int r = 0; r < layout.ranks(); ++r) {
      check_group(layout, r, layout.parameter_group(r), P, parameter, O / P);
      check_group(layout, r, layout.gradient_group(r), G, gradient, O / G);
      check_group(layout, r, layout.optimizer_group(r), O / G, chunk, 1);
      check_group(layout, r, layout.refresh_group(r), O / P, chunk, 1);
      check_group(layout, r, layout.replica_group(r), layout.replicas(), chunk, 0);
      EXPECT_EQ(parameter(layout.parameter_group(r)[0]), 0);
      EXPECT_EQ(gradient(layout.gradient_group(r)[0]), 0);
      EXPECT_EQ(chunk(layout.optimizer_group(r)[0]), gradient(r)) << "the group starts where its gradient piece does";
      EXPECT_EQ(chunk(layout.refresh_group(r)[0]), parameter(r)) << "the group starts where its parameter piece does";
    }
  }
}

TEST(Layout, GroupsOfEachKindPartitionTheJob) {
  using Group = std::vector<int> (Layout::*)(int) const;
  for (const Layout& layout : all_layouts(most_ranks)) {
    for (const Group group : {&Layout::parameter_group, &Layout::gradient_group, &Layout::optimizer_group,
                              &Layout::replica_group, &Layout::refresh_group}) {
      std::vector<int> seen(layout.ranks());
      std::map<std::vector<int>, int> askers;
      for (int r = 0; r < layout.ranks(); ++r) ++askers[(layout.*group)(r)];
      for (const auto& [members, count] : askers) {
        EXPECT_EQ(count, static_cast<int>(members.size())) << "every member, and no one else, names this group";
        for (const int member : members) ++seen[member];
      }
      EXPECT_THAT(seen, ::testing::Each(1)) << describe(layout);
    }
  }
}

TEST(Layout, HopsOfTheReductionMeetEveryRankOnce) {
  // Whoever contributes to a rank's final gradient, hop by hop: all ranks of the job, each once.
  for (const Layout& layout : all_layouts(most_ranks)) {
    for (int r = 0; r < layout.ranks(); ++r) {
      std::vector<int> sources;
      for (const int third : layout.replica_group(r)) {
        for (const int second : layout.optimizer_group(third)) {
          for (const int first : layout.gradient_group(second)) sources.push_back(first);
        }
      }
      std::ranges::sort(sources);
      std::vector<int> everyone(layout.ranks());
      std::iota(everyone.begin(), everyone.end(), 0);
      EXPECT_EQ(sources, everyone) << describe(layout);
    }
  }
}

TEST(Layout, ChunksAreRoundedUpToTheAlignment) {
  const Layout layout(8, {2, 4, 8});
  EXPECT_EQ(layout.chunk_elements(0, 4), 0);
  EXPECT_EQ(layout.chunk_elements(1, 4), 4);
  EXPECT_EQ(layout.chunk_elements(64, 4), 8);
  EXPECT_EQ(layout.chunk_elements(65, 4), 12);
  EXPECT_EQ(layout.chunk_elements(65, 1), 9);
  EXPECT_THROW(layout.chunk_elements(-1, 1), InvalidArgument);
  EXPECT_THROW(layout.chunk_elements(1, 0), InvalidArgument);
  EXPECT_THROW(layout.chunk_elements(INT64_MAX, INT64_MAX), InvalidArgument);

  std::mt19937_64 random(7);
  for (int i = 0; i < 2000; ++i) {
    const int ranks = 1 + static_cast<int>(random() % 96);
    const std::vector<Degrees> valid = all_degrees(ranks);
    const Degrees degrees = valid[random() % valid.size()];
    const int64_t elements = static_cast<int64_t>(random() >> (24 + random() % 40));
    const int64_t alignment = 1 + static_cast<int64_t>(random() % 200);
    const int64_t chunk = Layout(ranks, degrees).chunk_elements(elements, alignment);
    EXPECT_EQ(chunk % alignment, 0);
    EXPECT_GE(chunk * degrees.optimizer, elements);
    EXPECT_LT((chunk - alignment) * degrees.optimizer, std::max<int64_t>(elements, 1)) << "no smaller chunk would do";
  }
}

}  // namespace
}  // namespace tesserae::mesh
