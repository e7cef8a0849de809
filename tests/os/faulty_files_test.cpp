#include "tesserae/os/faulty_files.h"

#include <gmock/gmock.h>

#include <cerrno>

#include "tesserae/base/error.h"
#include "tests/os/scratch.h"

namespace tesserae::os {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using FaultyFilesTest = Scratch;

/// Replaces a file so that a reader sees the old or the new one: the kind of code that the twin is there to test.
void replace(const Path& path, std::string_view bytes) {
  const Path fresh = path.native() + ".tmp";
  const auto file = files().create(fresh);
  file->write(bytes);
  file->sync();
  file->close();
  files().rename(fresh, path);
  files().sync_directory(path.parent_path());
}

TEST_F(FaultyFilesTest, CountsAndNamesOperations) {
  FaultyFiles twin(files());
  const ScopedFiles scope(twin);
  replace(folder_ / "a", "new");
  const std::string fresh = (folder_ / "a.tmp").native();
  EXPECT_THAT(twin.log(), ElementsAre("create " + fresh, "write " + fresh, "sync " + fresh, "close " + fresh,
                                      "rename " + fresh, "sync_directory " + folder_.native()));
  EXPECT_EQ(twin.operations(), 6);
}

TEST_F(FaultyFilesTest, FailsEachOperationInTurn) {
  files().write(folder_ / "a", "old");
  FaultyFiles twin(files());
  for (int k = 1; k <= 6; ++k) {
    files().write(folder_ / "a", "old");
    twin.fail_at(k, {.error = ENOSPC});
    {
      const ScopedFiles scope(twin);
      EXPECT_THROW(replace(folder_ / "a", "new"), IoError) << k;
    }
    EXPECT_EQ(twin.operations(), k) << "nothing is done after a failure";
    EXPECT_EQ(files().read(folder_ / "a"), k <= 5 ? "old" : "new") << k;
  }
  twin.fail_at(0);
  const ScopedFiles scope(twin);
  EXPECT_NO_THROW(replace(folder_ / "a", "new"));
}

TEST_F(FaultyFilesTest, EveryOperationCanFail) {
  files().write(folder_ / "a", "bytes");
  const auto everything = [&] {
    files().status(folder_ / "a");
    files().list(folder_);
    char byte;
    files().open(folder_ / "a")->read_at(0, {&byte, 1});
    files().append(folder_ / "a")->write("more");
    files().make_directory(folder_ / "b");
    files().remove(folder_ / "b");
  };
  FaultyFiles twin(files());
  const ScopedFiles scope(twin);
  everything();
  const int operations = twin.operations();
  EXPECT_EQ(operations, 8);
  for (int k = 1; k <= operations; ++k) {
    twin.fail_at(k);
    EXPECT_THROW(everything(), IoError) << k;
    EXPECT_EQ(twin.operations(), k);
    twin.fail_at(0);
    files().remove_all(folder_ / "b");
  }
}

TEST_F(FaultyFilesTest, AWriteCanStopHalfWay) {
  FaultyFiles twin(files());
  twin.fail_at(2, {.error = ENOSPC, .written = 0.5});
  const ScopedFiles scope(twin);
  try {
    files().write(folder_ / "a", "12345678");
    FAIL() << "the disk was full";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr((folder_ / "a").native() + ": write: No space left on device"));
  }
  EXPECT_EQ(files().read(folder_ / "a"), "1234");
}

TEST_F(FaultyFilesTest, AFaultCanLast) {
  FaultyFiles twin(files());
  const ScopedFiles scope(twin);
  twin.fail_at(2, {.lasting = true});
  EXPECT_NO_THROW(files().exists(folder_));
  EXPECT_THROW(files().exists(folder_), IoError);
  EXPECT_THROW(files().exists(folder_), IoError);
  twin.fail_at(1);
  EXPECT_THROW(files().exists(folder_), IoError);
  EXPECT_TRUE(files().exists(folder_)) << "and need not";
}

TEST_F(FaultyFilesTest, TheRealFilesComeBack) {
  Files* const real = &files();
  {
    FaultyFiles outer(files());
    const ScopedFiles outer_scope(outer);
    EXPECT_EQ(&files(), &outer);
    {
      FaultyFiles inner(files());
      const ScopedFiles inner_scope(inner);
      EXPECT_EQ(&files(), &inner);
    }
    EXPECT_EQ(&files(), &outer);
  }
  EXPECT_EQ(&files(), real);
}

}  // namespace
}  // namespace tesserae::os
