#include "tesserae/data/mapping_cache.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/data/folder.h"

namespace tesserae::data {
namespace {

TEST(MappingCache, KeepsTheFilesUsedLast) {
  const testing::Folder folder;
  std::vector<os::Path> paths;
  for (int i = 0; i < 5; ++i)
    paths.push_back(folder.write(std::to_string(i), std::string(10, static_cast<char>('a' + i))));
  MappingCache cache(2);
  for (const size_t file : {0, 1, 0, 2, 3, 4, 0, 0, 4}) {
    EXPECT_EQ(cache.get(file, paths[file]).bytes(), std::string(10, static_cast<char>('a' + file)));
  }
  // 0 and 4 are mapped still: reading them needs no file any more. 3 was dropped.
  for (const auto& path : paths) std::filesystem::remove(path);
  EXPECT_EQ(cache.get(0, paths[0]).bytes(), "aaaaaaaaaa");
  EXPECT_EQ(cache.get(4, paths[4]).bytes(), "eeeeeeeeee");
  EXPECT_ANY_THROW(cache.get(3, paths[3]));
}

}  // namespace
}  // namespace tesserae::data
