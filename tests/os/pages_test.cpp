#include "tesserae/os/pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "tesserae/base/error.h"
#include "tesserae/os/memory.h"

namespace tesserae::os {
namespace {

TEST(Pages, AreZeroedAlignedAndOfAnySize) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, (size_t{3} << 20) + 5, size_t{8} << 20}) {
    auto* const memory = static_cast<char*>(map_pages(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 4096, 0u);
    EXPECT_TRUE(std::all_of(memory, memory + bytes, [](char byte) { return byte == 0; }));
    std::fill(memory, memory + bytes, 'x');
    EXPECT_EQ(memory[bytes - 1], 'x');
    unmap_pages(memory, bytes);
  }
}

TEST(Pages, GoBackToTheSystem) {
  constexpr size_t bytes = size_t{64} << 20;
  const uint64_t before = process_memory().resident;
  auto* const memory = static_cast<char*>(map_pages(bytes));
  std::fill(memory, memory + bytes, 'x');
  EXPECT_GE(process_memory().resident, before + bytes);
  unmap_pages(memory, bytes);
  EXPECT_LE(process_memory().resident, before + bytes / 8);
}

TEST(Pages, MoreThanThereIsIsAnIoError) {
  EXPECT_THROW(map_pages(SIZE_MAX / 4), OutOfMemory);
}

}  // namespace
}  // namespace tesserae::os
