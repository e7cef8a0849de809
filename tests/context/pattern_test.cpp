#include "tesserae/context/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tests/context/patterns.h"

namespace tesserae::context {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Pattern, CountsThePairsOfItsDefinition) {
  for (const Pattern& pattern : testing::patterns(19)) {
    for (int64_t begin = 0; begin <= 19; begin += 3) {
      for (int64_t end = begin; end <= 19; ++end) {
        int64_t pairs = 0;
        for (int64_t q = begin; q < end; ++q) {
          for (int64_t k = 0; k < 19; ++k) pairs += testing::attends(pattern, q, k) ? 1 : 0;
        }
        EXPECT_EQ(pattern.pairs({begin, end}), pairs) << to_string(pattern) << ", " << begin << " to " << end;
      }
    }
  }
}

TEST(Pattern, NamesTheDocumentsOfARun) {
  const Pattern pattern(10, true, 0, {0, 4, 5});
  EXPECT_THAT(pattern.documents_in({4, 6}), ElementsAre(Span{4, 5}, Span{5, 10}));
  EXPECT_THAT(pattern.documents_in({0, 4}), ElementsAre(Span{0, 4}));
  EXPECT_THAT(pattern.documents_in({3, 3}), ElementsAre());
  EXPECT_FALSE(pattern.one_document());
}

TEST(Pattern, RefusesWhatCannotBe) {
  const auto refused = [](int64_t length, bool causal, int64_t window, const std::vector<int64_t>& documents,
                          const char* why) {
    EXPECT_THAT([&] { Pattern(length, causal, window, documents); }, ThrowsMessage<InvalidArgument>(HasSubstr(why)));
  };
  refused(-1, true, 0, {}, "the length is -1");
  refused(8, true, -2, {}, "the window is -2");
  refused(8, false, 3, {}, "a window of 3 goes with causal attention only");
  refused(8, true, 0, {1}, "the first document begins at 1");
  refused(8, true, 0, {0, 4, 4}, "documents begin at 4 and then at 4");
  refused(8, true, 0, {0, 5, 4}, "documents begin at 5 and then at 4");
  refused(8, true, 0, {0, 8}, "a document begins at 8 of a sequence of length 8");
  refused(int64_t{1} << 40, true, 0, {}, "overflows");
}

}  // namespace
}  // namespace tesserae::context
