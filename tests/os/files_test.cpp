#include "tesserae/os/files.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>

#include "tesserae/base/error.h"
#include "tests/os/scratch.h"

namespace tesserae::os {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using FilesTest = Scratch;

template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const IoError& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(FilesTest, WritesAndReadsWholeFiles) {
  const Path path = folder_ / "a";
  for (const size_t size : {0, 1, 4095, 4096, 4097, 1 << 20}) {
    std::string bytes(size, '\0');
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 31);
    files().write(path, bytes);
    EXPECT_EQ(files().read(path), bytes) << size << " bytes, over an older file of another size";
    EXPECT_EQ(files().status(path).size, size);
  }
}

TEST_F(FilesTest, ReadsFilesThatDoNotKnowTheirSize) {
  EXPECT_THAT(files().read("/proc/self/status"), HasSubstr("VmHWM"));
  EXPECT_GT(files().read("/proc/self/maps").size(), 0u);
}

TEST_F(FilesTest, AppendsAndSyncs) {
  const Path path = folder_ / "metrics.jsonl";
  for (int i = 0; i < 2; ++i) {
    const auto file = files().append(path);
    file->write("one\n");
    file->write("");
    file->sync();
    file->write("two\n");
    file->close();
  }
  files().sync_directory(folder_);
  EXPECT_EQ(files().read(path), "one\ntwo\none\ntwo\n");
}

TEST_F(FilesTest, ReadsAtAnOffset) {
  const Path path = folder_ / "a";
  files().write(path, "0123456789");
  const auto file = files().open(path);
  std::string bytes(4, '.');
  EXPECT_EQ(file->read_at(3, bytes), 4u);
  EXPECT_EQ(bytes, "3456");
  EXPECT_EQ(file->read_at(8, bytes), 2u) << "fewer only at the end";
  EXPECT_EQ(bytes.substr(0, 2), "89");
  EXPECT_EQ(file->read_at(10, bytes), 0u);
}

TEST_F(FilesTest, TellsKindsApart) {
  files().write(folder_ / "file", "12345");
  std::filesystem::create_symlink("file", folder_ / "link");
  std::filesystem::create_symlink("nowhere", folder_ / "dangling");
  EXPECT_EQ(files().status(folder_).kind, FileKind::directory);
  EXPECT_EQ(files().status(folder_ / "file").kind, FileKind::file);
  EXPECT_FALSE(files().status(folder_ / "file").is_link);
  EXPECT_EQ(files().status(folder_ / "link").kind, FileKind::file);
  EXPECT_EQ(files().status(folder_ / "link").size, 5u);
  EXPECT_TRUE(files().status(folder_ / "link").is_link);
  EXPECT_EQ(files().status(folder_ / "dangling").kind, FileKind::missing);
  EXPECT_TRUE(files().status(folder_ / "dangling").is_link);
  EXPECT_EQ(files().status(folder_ / "missing").kind, FileKind::missing);
  EXPECT_EQ(files().status(folder_ / "file" / "below").kind, FileKind::missing);
  EXPECT_EQ(files().status("/dev/null").kind, FileKind::other);
  EXPECT_TRUE(files().exists(folder_ / "file"));
  EXPECT_FALSE(files().exists(folder_ / "missing"));
}

TEST_F(FilesTest, MakesRenamesAndRemoves) {
  files().make_directories(folder_ / "a" / "b" / "c");
  files().make_directories(folder_ / "a" / "b" / "");
  files().make_directory(folder_ / "a");
  files().write(folder_ / "a" / "b" / "new", "new");
  files().write(folder_ / "a" / "old", "old");
  files().rename(folder_ / "a" / "b" / "new", folder_ / "a" / "old");
  EXPECT_EQ(files().read(folder_ / "a" / "old"), "new");
  EXPECT_THAT(files().list(folder_ / "a"), ElementsAre("b", "old"));
  EXPECT_THAT(error_of([&] { files().remove(folder_ / "a"); }), HasSubstr("Directory not empty"));

  files().write(folder_ / "kept", "");
  std::filesystem::create_symlink(folder_ / "kept", folder_ / "a" / "link");
  std::filesystem::create_symlink("nowhere", folder_ / "a" / "dangling");
  files().remove_all(folder_ / "a");
  files().remove_all(folder_ / "a");
  EXPECT_THAT(files().list(folder_), ElementsAre("kept"));
}

TEST_F(FilesTest, WalksInOrderWithoutFollowingLinkedFolders) {
  files().make_directories(folder_ / "b" / "c");
  for (const char* name : {"z", "a", "b/2", "b/c/1"}) files().write(folder_ / name, "");
  std::filesystem::create_symlink("..", folder_ / "b" / "loop");
  std::filesystem::create_symlink("nowhere", folder_ / "dangling");
  std::filesystem::create_symlink("a", folder_ / "linked");
  EXPECT_THAT(files().walk(folder_), ElementsAre(folder_ / "a", folder_ / "b" / "2", folder_ / "b" / "c" / "1",
                                                 folder_ / "linked", folder_ / "z"));
  EXPECT_THAT(files().walk(folder_ / "a"), ElementsAre(folder_ / "a"));
  files().make_directory(folder_ / "empty");
  EXPECT_THAT(files().walk(folder_ / "empty"), IsEmpty());
}

TEST_F(FilesTest, ErrorsNameThePathAndTheReason) {
  const Path missing = folder_ / "missing";
  const auto says = [&](const char* reason) { return AllOf(HasSubstr(missing.native()), HasSubstr(reason)); };
  const char* none = "No such file or directory";
  EXPECT_THAT(error_of([&] { files().open(missing); }), says(none));
  EXPECT_THAT(error_of([&] { files().read(missing); }), says(none));
  EXPECT_THAT(error_of([&] { files().list(missing); }), says(none));
  EXPECT_THAT(error_of([&] { files().walk(missing); }), says(none));
  EXPECT_THAT(error_of([&] { files().remove(missing); }), says(none));
  EXPECT_THAT(error_of([&] { files().rename(missing, folder_ / "b"); }), says(none));
  EXPECT_THAT(error_of([&] { files().sync_directory(missing); }), says(none));
  EXPECT_THAT(error_of([&] { files().create(missing / "x"); }), says(none));
  EXPECT_THAT(error_of([&] { files().append(missing / "x"); }), says(none));
  EXPECT_THAT(error_of([&] { files().make_directory(missing / "x"); }), says(none));
  files().write(missing, "now a file");
  EXPECT_THAT(error_of([&] { files().make_directory(missing); }), says("File exists"));
  EXPECT_THAT(error_of([&] { files().read(folder_); }), HasSubstr("Is a directory"));
}

TEST_F(FilesTest, ReportsADiskThatIsFull) {
  if (!files().exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  const auto file = files().append("/dev/full");
  EXPECT_THAT(error_of([&] { file->write("x"); }), AllOf(HasSubstr("/dev/full"), HasSubstr("No space left")));
}

TEST_F(FilesTest, ReportsAFileThatGrowsOverItsLimit) {
  // A real short write: the kernel takes what fits below the limit, then refuses the rest.
  rlimit earlier{};
  ::getrlimit(RLIMIT_FSIZE, &earlier);
  const rlimit small{.rlim_cur = 1000, .rlim_max = earlier.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const auto file = files().create(folder_ / "a");
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_of([&] { file->write(std::string(3000, 'x')); });
  ::setrlimit(RLIMIT_FSIZE, &earlier);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(error, HasSubstr("cannot write 2000 bytes: File too large"));
  EXPECT_EQ(files().status(folder_ / "a").size, 1000u);
}

}  // namespace
}  // namespace tesserae::os
