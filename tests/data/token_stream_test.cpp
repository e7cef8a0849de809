#include "tesserae/data/token_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tests/data/folder.h"

namespace tesserae::data {
namespace {

using ::testing::ElementsAre;
using testing::Folder;
using ::testing::HasSubstr;

std::vector<int64_t> read(TokenStream& stream, int64_t begin, int64_t count) {
  std::vector<int64_t> tokens(static_cast<size_t>(count));
  stream.read(begin, tokens);
  return tokens;
}

template <class Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(TokenStream, TextInSortedOrderWithAnEndAfterEachFile) {
  const Folder folder;
  folder.write("b.py", "yz");
  folder.write("a/second.py", "c");
  folder.write("a/first.py", "ab");
  folder.write("empty.py", "");
  folder.write("notes.txt", "ignored");
  TokenStream stream({.paths = {folder.path()}, .suffixes = {".py"}});
  EXPECT_EQ(stream.files(), 3);
  EXPECT_EQ(stream.vocabulary(), 257);
  EXPECT_THAT(read(stream, 0, stream.size()), ElementsAre('a', 'b', 256, 'c', 256, 'y', 'z', 256));
}

TEST(TokenStream, EveryRangeIsAPartOfTheWhole) {
  const Folder folder;
  for (int i = 0; i < 12; ++i)
    folder.write("f" + std::to_string(10 + i),
                 std::string(static_cast<size_t>(i % 4) * 3 + 1, static_cast<char>('a' + i)));
  TokenStream stream({.paths = {folder.path()}});
  const auto whole = read(stream, 0, stream.size());
  for (int64_t begin = 0; begin <= stream.size(); ++begin) {
    for (int64_t end = begin; end <= stream.size(); ++end) {
      const std::vector<int64_t> expected(whole.begin() + begin, whole.begin() + end);
      ASSERT_EQ(read(stream, begin, end - begin), expected) << begin << " " << end;
    }
  }
  EXPECT_THROW(read(stream, 0, stream.size() + 1), InvalidArgument);
  EXPECT_THROW(read(stream, -1, 1), InvalidArgument);
}

TEST(TokenStream, BytesAboveAsciiAreNotNegative) {
  const Folder folder;
  TokenStream stream({.paths = {folder.write("euro.txt", "\xE2\x82\xAC")}});
  EXPECT_THAT(read(stream, 0, 4), ElementsAre(0xE2, 0x82, 0xAC, 256));
}

TEST(TokenStream, FilesThatAreNotUtf8AreSkippedAndCounted) {
  const Folder folder;
  folder.write("a", "fine");
  folder.write("b", std::string("\xFF\xFE\x00q", 4));
  folder.write("c", "bad \xC3");
  TokenStream stream({.paths = {folder.path()}});
  EXPECT_EQ(stream.files(), 1);
  EXPECT_EQ(stream.skipped_files(), 2);
  EXPECT_EQ(stream.size(), 5);
}

TEST(TokenStream, FilesInTheOrderGivenWhateverTheirSuffix) {
  const Folder folder;
  const auto first = folder.write("z.md", "1"), second = folder.write("a.rst", "2");
  TokenStream stream({.paths = {first, second}, .suffixes = {".py"}});
  EXPECT_THAT(read(stream, 0, 4), ElementsAre('1', 256, '2', 256));
}

TEST(TokenStream, TheFingerprintIsOfFilesAndTheirOrder) {
  const Folder folder, elsewhere;
  const auto of = [](const Folder& in, std::vector<const char*> names) {
    StreamOptions options;
    for (const char* const name : names) options.paths.push_back(in.path() / name);
    return TokenStream(options).fingerprint();
  };
  for (const Folder* const in : {&folder, &elsewhere}) {
    in->write("a", "ab");
    in->write("b", "bc");
  }
  const uint64_t expected = of(folder, {"a", "b"});
  EXPECT_EQ(of(elsewhere, {"a", "b"}), expected);
  EXPECT_NE(of(folder, {"b", "a"}), expected);
  folder.write("b", "bd");
  EXPECT_NE(of(folder, {"a", "b"}), expected);
}

TEST(TokenStream, TokensOf16And32Bits) {
  const Folder folder;
  const auto a = folder.write_tokens<uint16_t>("a.bin", {1, 65535, 300}),
             b = folder.write_tokens<uint16_t>("b.bin", {7});
  TokenStream narrow({.paths = {a, b}, .format = Format::uint16});
  EXPECT_EQ(narrow.vocabulary(), 65536);
  EXPECT_THAT(read(narrow, 0, 4), ElementsAre(1, 65535, 300, 7));
  EXPECT_THAT(read(narrow, 2, 2), ElementsAre(300, 7));

  const auto c = folder.write_tokens<uint32_t>("c.bin", {100'000, 2});
  TokenStream wide({.paths = {c}, .format = Format::uint32, .vocabulary = 128'256});
  EXPECT_THAT(read(wide, 0, 2), ElementsAre(100'000, 2));
}

TEST(TokenStream, TheLayoutOfATokenFileIsLittleEndian) {
  const Folder folder;
  TokenStream stream({.paths = {folder.write("a.bin", std::string("\x01\x02", 2))}, .format = Format::uint16});
  EXPECT_THAT(read(stream, 0, 1), ElementsAre(0x0201));
}

TEST(TokenStream, TokensOutsideTheVocabularyAreFoundWhenRead) {
  const Folder folder;
  const auto path = folder.write_tokens<uint16_t>("tokens.bin", {1, 2, 3, 50'257, 4});
  TokenStream stream({.paths = {path}, .format = Format::uint16, .vocabulary = 50'257});
  EXPECT_THAT(read(stream, 0, 3), ElementsAre(1, 2, 3));
  EXPECT_THAT(message_of([&] { read(stream, 2, 3); }), HasSubstr(path.string() + " has token 50257 at offset 3"));
}

TEST(TokenStream, ErrorsSayWhatIsWrong) {
  const Folder folder;
  const auto missing = folder.path() / "missing";
  EXPECT_THAT(message_of([&] { TokenStream({.paths = {missing}}); }), HasSubstr("there is no " + missing.string()));

  folder.write("a.txt", "text");
  EXPECT_THAT(message_of([&] { TokenStream({.paths = {folder.path()}, .suffixes = {".py"}}); }),
              HasSubstr("1 files do not have the suffixes"));
  const auto odd = folder.write("odd.bin", "12345");
  EXPECT_THAT(message_of([&] { TokenStream({.paths = {odd}, .format = Format::uint16}); }),
              HasSubstr(odd.string() + " has 5 bytes, no multiple of 2"));
  EXPECT_THAT(message_of([&] { TokenStream({.paths = {odd}, .format = Format::uint32}); }), HasSubstr("vocabulary"));
  EXPECT_THAT(message_of([&] { TokenStream({.paths = {odd}, .vocabulary = 256}); }), HasSubstr("257"));
  const auto empty = folder.write("empty.bin", "");
  EXPECT_THAT(message_of([&] { TokenStream({.paths = {empty}, .format = Format::uint16}); }),
              HasSubstr("has no token"));
  EXPECT_THAT(message_of([] { format_from_name("uint61"); }), HasSubstr("\"uint16\""));
}

TEST(TokenStream, AFileThatChangesIsNoticed) {
  const Folder folder;
  folder.write("a.txt", "0123456789");
  TokenStream stream({.paths = {folder.path()}});
  folder.write("a.txt", "0123");
  EXPECT_THROW(read(stream, 0, 2), Corruption);
}

TEST(TokenStream, AFileThatIsGoneIsNotAFileThatChanged) {
  const Folder folder;
  const auto path = folder.write("a.txt", "0123456789");
  TokenStream stream({.paths = {path}});
  std::filesystem::remove(path);
  EXPECT_THROW(read(stream, 0, 2), IoError);
}

TEST(TokenStream, AFileThatIsTruncatedWhileItIsReadIsNamed) {
  const Folder folder;
  const auto path = folder.write("a.txt", std::string(10'000, 'x'));
  TokenStream stream({.paths = {path}});
  read(stream, 0, 2);
  std::filesystem::resize_file(path, 5'000);
  EXPECT_EQ(read(stream, 4'990, 10).back(), 'x');
  EXPECT_THAT(message_of([&] { read(stream, 4'990, 20); }),
              HasSubstr(path.string() + " had 10000 bytes and now has 5000"));
}

TEST(TokenStream, TextIsCheckedOverTheBordersOfBlocks) {
  const Folder folder;
  const std::string euro = "\xE2\x82\xAC";
  for (const size_t before : {(1 << 20) - 3, (1 << 20) - 2, (1 << 20) - 1, 1 << 20}) {
    const auto text = folder.write("a.txt", std::string(before, 'x') + euro + "y");
    EXPECT_EQ(TokenStream({.paths = {text}}).size(), static_cast<int64_t>(before) + 5);
    const auto broken = folder.write("b.txt", std::string(before, 'x') + euro.substr(0, 2) + "y");
    EXPECT_EQ(TokenStream({.paths = {text, broken}}).skipped_files(), 1) << before;
  }
}

}  // namespace
}  // namespace tesserae::data
