#include "tesserae/data/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace tesserae::data {
namespace {

std::string encode(uint32_t point) {
  auto byte = [](uint32_t value) { return static_cast<char>(value); };
  if (point < 0x80) return {byte(point)};
  if (point < 0x800) return {byte(0xC0 | point >> 6), byte(0x80 | (point & 63))};
  if (point < 0x10000) return {byte(0xE0 | point >> 12), byte(0x80 | (point >> 6 & 63)), byte(0x80 | (point & 63))};
  return {byte(0xF0 | point >> 18), byte(0x80 | (point >> 12 & 63)), byte(0x80 | (point >> 6 & 63)),
          byte(0x80 | (point & 63))};
}

TEST(Utf8, EveryCodePointButSurrogates) {
  for (uint32_t point = 0; point < 0x140000; ++point) {
    const bool valid = point < 0x110000 && (point < 0xD800 || point > 0xDFFF);
    ASSERT_EQ(is_utf8(encode(point)), valid) << std::hex << point;
  }
}

TEST(Utf8, OverlongForms) {
  for (const std::string bytes :
       {"\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xE0\x9F\xBF", "\xF0\x80\x80\x80", "\xF0\x8F\xBF\xBF"}) {
    EXPECT_FALSE(is_utf8(bytes));
  }
}

TEST(Utf8, ErrorsAtEveryPlaceOfLongText) {
  const std::string text(40, 'x');
  EXPECT_TRUE(is_utf8(text));
  for (size_t i = 0; i < text.size(); ++i) {
    for (const char bad : {'\x80', '\xBF', '\xC3', '\xE2', '\xF1', '\xFF'}) {
      std::string broken = text;
      broken[i] = bad;
      EXPECT_FALSE(is_utf8(broken)) << i;
    }
    EXPECT_TRUE(is_utf8(text.substr(0, i) + "\xE2\x82\xAC" + text.substr(i)));
    EXPECT_FALSE(is_utf8(text.substr(0, i) + "\xE2\x82")) << "cut off at the end";
  }
  EXPECT_TRUE(is_utf8(""));
}

TEST(Utf8, ABlockMayBreakOffACharacter) {
  for (const std::string character : {"a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"}) {
    for (size_t bytes = 0; bytes <= character.size(); ++bytes) {
      EXPECT_EQ(broken_off("text" + character.substr(0, bytes)), bytes < character.size() ? bytes : 0);
    }
  }
  EXPECT_EQ(broken_off("\x80\x80\x80\x80"), 0u) << "no character begins there";
  EXPECT_EQ(broken_off(""), 0u);
}

}  // namespace
}  // namespace tesserae::data
