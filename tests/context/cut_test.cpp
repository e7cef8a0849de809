#include "tesserae/context/cut.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tesserae/base/error.h"
#include "tests/context/patterns.h"

namespace tesserae::context {
namespace {

/// Checks what holds of every cut.
void expect_cut(const Cut& cut) {
  const int64_t length = cut.pattern().length();
  std::vector<int> owners(static_cast<size_t>(length), -1);
  size_t spans = 0;
  for (int rank = 0; rank < cut.ranks(); ++rank) {
    int64_t last = -1;
    for (const Span& span : cut.spans(rank)) {
      EXPECT_GT(span.begin, last) << "ascending, and not joined to the span before";
      EXPECT_FALSE(span.empty());
      last = span.end;
      for (int64_t i = span.begin; i < span.end; ++i) {
        EXPECT_EQ(owners.at(static_cast<size_t>(i)), -1) << "position " << i << " has two owners";
        owners[static_cast<size_t>(i)] = rank;
      }
    }
    spans += cut.spans(rank).size();
    EXPECT_GE(cut.tokens(rank), length / cut.ranks());
    EXPECT_LE(cut.tokens(rank), cut.most_tokens());
  }
  EXPECT_EQ(std::ranges::count(owners, -1), 0) << "every position has an owner";
  EXPECT_LE(spans, static_cast<size_t>(2 * cut.ranks() - 1));
}

double imbalance(const Cut& cut) {
  int64_t most = 0;
  for (int rank = 0; rank < cut.ranks(); ++rank) most = std::max(most, cut.pairs(rank));
  return static_cast<double>(most) * cut.ranks() /
         static_cast<double>(cut.pattern().pairs({0, cut.pattern().length()}));
}

TEST(Cut, EveryPositionHasOneOwner) {
  for (const int64_t length : {1, 2, 3, 5, 8, 19, 64}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (const Pattern& pattern : length < 19 ? std::vector{Pattern(length)} : testing::patterns(length)) {
        SCOPED_TRACE(cat(to_string(pattern), " over ", ranks));
        expect_cut(Cut(pattern, ranks));
      }
    }
  }
}

TEST(Cut, SharesOutPairsAsEvenlyAsTokens) {
  for (const int64_t length : {1000, 4096, 32'768}) {
    for (const int ranks : {2, 3, 4, 5, 8}) {
      const Cut cut(Pattern(length), ranks);
      expect_cut(cut);
      EXPECT_LE(imbalance(cut), 1.02) << length << " over " << ranks;
    }
  }
}

// A thousand mixes of documents of all lengths, some longer than everything else together.
TEST(Cut, PackedDocumentsAreSharedOutEvenly) {
  std::mt19937 random(7);
  double worst = 0;
  for (int i = 0; i < 1000; ++i) {
    const int64_t length = 2048 + static_cast<int64_t>(random() % 14'000);
    const double scale = 4 + static_cast<double>(random() % 12);
    std::vector<int64_t> documents{0};
    while (true) {
      const double size = std::exp2(static_cast<double>(random() % 1000) / 1000 * scale);
      const int64_t next = documents.back() + std::max<int64_t>(1, static_cast<int64_t>(size));
      if (next >= length) break;
      documents.push_back(next);
    }
    for (const int64_t window : {int64_t{0}, int64_t{100}}) {
      const Cut cut(Pattern(length, true, window, documents), 2 + i % 7);
      if (i % 100 == 0) expect_cut(cut);
      worst = std::max(worst, imbalance(cut));
    }
  }
  RecordProperty("worst", std::to_string(worst));
  EXPECT_LE(worst, 1.02);
}

TEST(Cut, OfTwoRanksIsTheZigzag) {
  const Cut cut(Pattern(16), 2);
  EXPECT_THAT(cut.spans(0), ::testing::ElementsAre(Span{4, 12}));
  EXPECT_THAT(cut.spans(1), ::testing::ElementsAre(Span{0, 4}, Span{12, 16}));
}

TEST(Cut, SomeRanksHaveNothingOfAShortSequence) {
  const Cut cut(Pattern(2), 4);
  EXPECT_EQ(cut.tokens(0) + cut.tokens(1), 2);
  EXPECT_TRUE(cut.spans(2).empty());
  EXPECT_TRUE(cut.spans(3).empty());
  EXPECT_EQ(Cut(Pattern(0), 3).most_tokens(), 0);
  EXPECT_THROW(Cut(Pattern(4), 0), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::context
