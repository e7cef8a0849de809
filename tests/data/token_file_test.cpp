#include "tesserae/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <numeric>

#include "tesserae/base/error.h"
#include "tesserae/data/token_format.h"
#include "tesserae/data/token_stream.h"
#include "tesserae/data/token_writer.h"
#include "tesserae/os/faulty_files.h"
#include "tests/data/folder.h"

namespace tesserae::data {
namespace {

using testing::Folder;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string bytes_of(const os::Path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<uint32_t> counting(int64_t count, uint32_t below) {
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint32_t>(i) % below;
  return tokens;
}

os::Path write(const Folder& folder, const std::string& name, const std::vector<uint32_t>& tokens,
               const TokenWriterOptions& options) {
  TokenWriter writer(folder.path() / name, options);
  writer.add(tokens);
  writer.finish();
  return folder.path() / name;
}

template <class Action>
std::string corruption_of(const Action& action) {
  try {
    action();
  } catch (const Corruption& error) {
    return error.what();
  } catch (const InvalidArgument& error) {
    return cat("InvalidArgument: ", error.what());
  }
  return "nothing was thrown";
}

std::vector<int64_t> read_tokens(TokenStream& stream, int64_t begin, int64_t count) {
  std::vector<int64_t> tokens(static_cast<size_t>(count));
  stream.read(begin, tokens);
  return tokens;
}

TEST(TokenFile, WhatIsWrittenIsRead) {
  const Folder folder;
  for (const auto& [vocabulary, bytes] : {std::pair{50'257, 2}, {1 << 16, 2}, {(1 << 16) + 1, 4}, {128'256, 4}}) {
    // Three blocks and a bit, added in runs that end anywhere.
    const auto tokens =
        counting(3 * static_cast<int64_t>(token_block_bytes) / bytes + 77, static_cast<uint32_t>(vocabulary));
    TokenWriter writer(folder.path() / "a.bin", {.vocabulary = vocabulary, .document_end = 7, .replace = true});
    for (size_t begin = 0, run = 1; begin < tokens.size(); begin += run, run = run * 3 + 1) {
      writer.add(std::span(tokens).subspan(begin, std::min(run, tokens.size() - begin)));
    }
    writer.finish();
    const TokenFile file(folder.path() / "a.bin");
    EXPECT_EQ(file.info().bytes_per_token, bytes);
    EXPECT_EQ(file.info().vocabulary, vocabulary);
    EXPECT_EQ(file.info().document_end, 7);
    EXPECT_EQ(file.info().tokens, static_cast<int64_t>(tokens.size()));
    TokenStream stream({.paths = {folder.path()}, .format = Format::tokens});
    EXPECT_EQ(stream.document_end(), 7);
    EXPECT_EQ(stream.vocabulary(), vocabulary);
    // In the middle first: then blocks that are known to be good, and others, lie side by side.
    const auto size = stream.size(), block = static_cast<int64_t>(token_block_bytes) / bytes;
    for (const auto& [begin, count] : {std::pair{block + 5, int64_t{3}},
                                       {block - 2, 4l},
                                       {3 * block, size - 3 * block},
                                       {0l, size},
                                       {7l, size - 9}}) {
      const std::vector<int64_t> expected(tokens.begin() + begin, tokens.begin() + begin + count);
      ASSERT_EQ(read_tokens(stream, begin, count), expected) << begin << " " << count;
    }
  }
}

TEST(TokenFile, TheBytesArePinned) {
  // docs/format.md. Files are kept for years: a change of these bytes is another version.
  const Folder folder;
  const auto bytes = bytes_of(write(folder, "a.bin", {1, 2, 258}, {.vocabulary = 300, .document_end = 2}));
  ASSERT_EQ(bytes.size(), 64u + 3 * 2 + 8 + 32);
  EXPECT_EQ(bytes.substr(0, 40),
            std::string("TSRTOKEN\1\0\0\0\2\0\0\0\x2C\1\0\0\0\0\0\0\2\0\0\0\0\0\0\0\0\0\1\0\0\0\0\0", 40));
  EXPECT_EQ(bytes.substr(64, 6), std::string("\1\0\2\0\2\1", 6));
  EXPECT_EQ(bytes.substr(78, 8), std::string("\3\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(bytes.substr(102), "NEKOTRST");
  EXPECT_EQ(bytes_of(write(folder, "b.bin", {1, 2, 258}, {.vocabulary = 300, .header = false})),
            std::string("\1\0\2\0\2\1", 6));
}

TEST(TokenFile, EveryDamagedByteIsFound) {
  const Folder folder;
  const auto path = write(folder, "a.bin", counting(20, 500), {.vocabulary = 500, .document_end = 0});
  const std::string good = bytes_of(path);
  const auto look = [&] { return corruption_of([&] { TokenFile(path).verify(); }); };
  ASSERT_EQ(look(), "nothing was thrown");
  for (size_t i = 0; i < good.size(); ++i) {
    for (const int bit : {0, 7}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      folder.write("a.bin", bad);
      const std::string what = look();
      ASSERT_THAT(what, StartsWith("[TokenFile] " + path.string())) << i;
      const char* const where = i < 64            ? "(bytes 0 to 64 of 144)"
                                : i < 64 + 40 + 8 ? "bytes 64 to 104 (tokens 0 on), or their checksum at byte 104"
                                                  : "(bytes 112 to 144 of 144)";
      ASSERT_THAT(what, HasSubstr(where)) << i;
    }
  }
}

TEST(TokenFile, ShortAndLongFilesAreFoundWhenTheyAreOpened) {
  const Folder folder;
  const auto path = write(folder, "a.bin", counting(20, 500), {.vocabulary = 500});
  const std::string good = bytes_of(path);
  const auto look = [&](const std::string& bytes) {
    folder.write("a.bin", bytes);
    return corruption_of([&] { TokenFile file(path); });
  };
  for (size_t size = 8; size < good.size(); ++size) {
    ASSERT_THAT(look(good.substr(0, size)), HasSubstr(cat(" of ", size, ")"))) << size;
  }
  for (size_t size = 0; size < 8; ++size) {
    ASSERT_THAT(look(good.substr(0, size)), StartsWith("InvalidArgument")) << size;
  }
  EXPECT_THAT(look(good + "x"), HasSubstr("cut short, or its footer has changed"));
  EXPECT_THAT(look(good.substr(0, 70) + good.substr(72)), HasSubstr("it was written with 144 bytes"));
  EXPECT_THAT(look(good.substr(0, 70) + good.substr(70, 2) + good.substr(70)), HasSubstr("it was written with 144"));
}

TEST(TokenFile, ABlockThatHasChangedIsFoundByWhoReadsIt) {
  const Folder folder;
  const auto path = write(folder, "a.bin", counting(100'000, 500), {.vocabulary = 500});
  std::string bytes = bytes_of(path);
  bytes[64 + token_block_bytes + 10] ^= 1;
  folder.write("a.bin", bytes);
  TokenStream stream({.paths = {path}, .format = Format::tokens});
  EXPECT_EQ(read_tokens(stream, 0, 10).back(), 9);
  const std::string where = cat(path.string(), ": bytes ", 64 + token_block_bytes, " to ", 64 + 2 * token_block_bytes,
                                " (tokens 32768 on), or their checksum at byte ", 64 + 200'000 + 8);
  EXPECT_THAT(corruption_of([&] { read_tokens(stream, 32'767, 2); }), HasSubstr(where));
  EXPECT_THAT(corruption_of([&] { read_tokens(stream, 40'000, 1); }), HasSubstr(where)) << "at every attempt";
  EXPECT_EQ(read_tokens(stream, 65'536, 1).back(), 65'536 % 500);
}

TEST(TokenFile, AFileThatIsTruncatedWhileItIsReadIsNamed) {
  const Folder folder;
  const auto path = write(folder, "a.bin", counting(100'000, 500), {.vocabulary = 500});
  TokenStream stream({.paths = {path}, .format = Format::tokens});
  read_tokens(stream, 0, 2);
  std::filesystem::resize_file(path, 150'000);
  EXPECT_THAT(corruption_of([&] { read_tokens(stream, 90'000, 2); }), HasSubstr("and now ends at 150000"));
}

TEST(TokenFile, FilesOfOneDataSetComeFromOneTokenizer) {
  const Folder folder;
  const auto a = write(folder, "a.bin", {1, 2}, {.vocabulary = 300, .document_end = 2});
  const auto b = write(folder, "b.bin", {3}, {.vocabulary = 300, .document_end = 2, .bytes_per_token = 4});
  const auto other = write(folder, "c.bin", {1}, {.vocabulary = 300, .document_end = 1});
  const auto larger = write(folder, "d.bin", {1}, {.vocabulary = 301, .document_end = 2});
  const auto open = [](std::vector<os::Path> paths, int64_t vocabulary = 0) {
    return corruption_of([&] { TokenStream({.paths = paths, .format = Format::tokens, .vocabulary = vocabulary}); });
  };
  TokenStream both({.paths = {a, b}, .format = Format::tokens});
  EXPECT_EQ(read_tokens(both, 0, 3), (std::vector<int64_t>{1, 2, 3})) << "of different widths";
  EXPECT_THAT(open({a, other}), HasSubstr("a vocabulary of 300 and ends documents with token 1, but " + a.string()));
  EXPECT_THAT(open({a, larger}), HasSubstr("a vocabulary of 301, more than the 300 of the files before it"));
  EXPECT_THAT(open({a}, 200), HasSubstr("a vocabulary of 300, more than the 200 asked for"));
  EXPECT_EQ(open({a}, 512), "nothing was thrown") << "a model may have room for more";
}

TEST(TokenFile, FormatsAreNotMistaken) {
  const Folder folder;
  const auto path = write(folder, "a.bin", {1, 2}, {.vocabulary = 300});
  const auto plain = folder.write_tokens<uint16_t>("b.bin", {1, 2, 3});
  for (const Format format : {Format::uint16, Format::text}) {
    EXPECT_THAT(corruption_of([&] { TokenStream({.paths = {path}, .format = format}); }),
                HasSubstr(path.string() + " is a token file with a header; give the format tokens"));
  }
  EXPECT_THAT(corruption_of([&] { TokenStream({.paths = {plain}, .format = Format::tokens}); }),
              HasSubstr(plain.string() + " does not begin as a token file; tokens without a header are"));
}

TEST(TokenWriter, NothingIsThereUntilItIsFinished) {
  const Folder folder;
  const auto path = folder.path() / "a.bin", temporary = folder.path() / "a.bin.tmp";
  {
    TokenWriter writer(path, {.vocabulary = 10});
    writer.add(std::vector<uint32_t>{1, 2, 3});
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_THAT(corruption_of([&] { TokenWriter(path, {.vocabulary = 10}); }), HasSubstr("another process is writing"));
  }
  EXPECT_FALSE(std::filesystem::exists(temporary));
  folder.write("a.bin.tmp", "what a killed process has left");
  EXPECT_EQ(TokenFile(write(folder, "a.bin", {1}, {.vocabulary = 10})).info().tokens, 1);
  EXPECT_FALSE(std::filesystem::exists(temporary));
  EXPECT_THAT(corruption_of([&] { TokenWriter(path, {.vocabulary = 10}); }), HasSubstr("is there already"));
}

TEST(TokenWriter, RefusesWhatCannotBe) {
  const Folder folder;
  const auto path = folder.path() / "a.bin";
  const auto refusal = [&](const TokenWriterOptions& options) {
    return corruption_of([&] { TokenWriter(path, options).finish(); });
  };
  EXPECT_THAT(refusal({.vocabulary = 0}), HasSubstr("vocabulary is 0"));
  EXPECT_THAT(refusal({.vocabulary = 10, .document_end = 10}), HasSubstr("document_end is 10; the tokens are 0 to 9"));
  EXPECT_THAT(refusal({.vocabulary = 70'000, .bytes_per_token = 2}), HasSubstr("a vocabulary of 70000 takes 4"));
  EXPECT_THAT(refusal({.vocabulary = 10}), HasSubstr("there is no token for " + path.string()));
  TokenWriter writer(path, {.vocabulary = 10});
  EXPECT_THAT(corruption_of([&] { writer.add(std::vector<uint32_t>{1, 10}); }), HasSubstr("token 10 at 1"));
  EXPECT_EQ(writer.tokens(), 0);
}

TEST(TokenWriter, AFailureAtAnyStepLeavesNoPartOfAFile) {
  const Folder folder;
  const auto path = folder.path() / "a.bin";
  os::FaultyFiles faulty(os::files());
  const os::ScopedFiles scope(faulty);
  const auto attempt = [&] { write(folder, "a.bin", counting(100'000, 500), {.vocabulary = 500, .replace = true}); };
  attempt();
  const int operations = faulty.operations();
  EXPECT_GT(operations, 8);
  for (int k = 1; k <= operations; ++k) {
    std::filesystem::remove(path);
    faulty.fail_at(k, {.written = 0.5, .lasting = true});
    EXPECT_THROW(attempt(), IoError) << k;
    const std::string failed = faulty.log()[static_cast<size_t>(k) - 1];
    faulty.fail_at(0);
    // Only the last step, which makes the name last, comes after the whole file has it.
    ASSERT_EQ(std::filesystem::exists(path), failed.starts_with("sync_directory")) << failed;
    if (std::filesystem::exists(path)) TokenFile(path).verify();
  }
}

}  // namespace
}  // namespace tesserae::data
