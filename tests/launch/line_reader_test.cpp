#include "tesserae/launch/line_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tesserae::launch {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(LineReader, JoinsWhatComesInPieces) {
  LineReader reader;
  EXPECT_THAT(reader.add("one\ntw"), ElementsAre("one"));
  EXPECT_THAT(reader.add("o\n\nthree"), ElementsAre("two", ""));
  EXPECT_THAT(reader.rest(), ElementsAre("three"));
  EXPECT_THAT(reader.rest(), IsEmpty());
}

TEST(LineReader, ACarriageReturnStartsTheLineAnew) {
  LineReader reader;
  EXPECT_THAT(reader.add("10%\r20%\r30%\nend\r\n"), ElementsAre("30%", "end"));
}

TEST(LineReader, CutsALineWithoutEnd) {
  LineReader reader;
  const std::string longest(1 << 20, 'x');
  EXPECT_THAT(reader.add(longest + longest + "xxx"), ElementsAre(longest, longest));
}

}  // namespace
}  // namespace tesserae::launch
