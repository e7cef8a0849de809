#include "tesserae/train/sample.h"

#include <gtest/gtest.h>

namespace tesserae::train {
namespace {

std::vector<int64_t> tokens(const std::string& bytes) {
  std::vector<int64_t> result;
  for (const char byte : bytes) result.push_back(static_cast<unsigned char>(byte));
  return result;
}

TEST(Printable, KeepsTextAsItIs) {
  EXPECT_EQ(printable(tokens("def f():\n\treturn 'é€😀'\n")), "def f():\n\treturn 'é€😀'\n");
}

TEST(Printable, MarksBytesThatAreNoText) {
  EXPECT_EQ(printable(tokens("a\xFF\xC3")), "a\uFFFD\uFFFD");
  EXPECT_EQ(printable(tokens("\xC0\x80")), "\uFFFD\uFFFD") << "overlong";
  EXPECT_EQ(printable(tokens("\xED\xA0\x80")), "\uFFFD\uFFFD\uFFFD") << "surrogate";
  EXPECT_EQ(printable(tokens("\xF4\x90\x80\x80")), "\uFFFD\uFFFD\uFFFD\uFFFD") << "too high";
}

TEST(Printable, TerminalCommandsDoNotReachTheTerminal) {
  EXPECT_EQ(printable(tokens("a\x1B[2Jb\r\x7F")), "a[2Jb");
  EXPECT_EQ(printable(tokens("a\xC2\x9B"
                             "2J")),
            "a2J");
}

TEST(Printable, TheEndOfAFileIsALineEnd) {
  EXPECT_EQ(printable({'a', 256, 'b'}), "a\nb");
}

}  // namespace
}  // namespace tesserae::train
