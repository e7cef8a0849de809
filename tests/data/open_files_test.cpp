#include "tesserae/data/open_files.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/data/folder.h"

namespace tesserae::data {
namespace {

TEST(OpenFiles, KeepsTheFilesUsedLast) {
  const testing::Folder folder;
  std::vector<os::Path> paths;
  for (int i = 0; i < 5; ++i)
    paths.push_back(folder.write(std::to_string(i), std::string(10, static_cast<char>('a' + i))));
  OpenFiles open(2);
  const auto content = [&](size_t file) {
    std::string bytes(11, '.');
    bytes.resize(open.get(file, paths[file]).read_at(0, bytes));
    return bytes;
  };
  for (const size_t file : {0, 1, 0, 2, 3, 4, 0, 0, 4}) {
    EXPECT_EQ(content(file), std::string(10, static_cast<char>('a' + file)));
  }
  // 0 and 4 are open still: reading them needs no name any more. 3 was dropped.
  for (const auto& path : paths) std::filesystem::remove(path);
  EXPECT_EQ(content(0), "aaaaaaaaaa");
  EXPECT_EQ(content(4), "eeeeeeeeee");
  EXPECT_ANY_THROW(content(3));
}

}  // namespace
}  // namespace tesserae::data
