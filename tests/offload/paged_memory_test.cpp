#include "tesserae/offload/paged_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "tesserae/base/error.h"
#include "tests/os/scratch.h"

namespace tesserae::offload {
namespace {

constexpr size_t block = PagedMemory::block;

class PagedMemoryTest : public os::Scratch, public ::testing::WithParamInterface<os::DiskQueue::Engine> {
 protected:
  std::shared_ptr<Disk> disk(int64_t memory) {
    return std::make_shared<Disk>(DiskOptions{folder_, memory, GetParam()});
  }
};

// The scratch file has no name: this process finds it among its own descriptors.
std::filesystem::path scratch_of(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry.path(), error).native().starts_with(folder.native())) return entry.path();
  }
  return {};
}

TEST_P(PagedMemoryTest, IsZeroAtFirstAndTakesNoMemory) {
  const auto scratch = disk(4 * block);
  PagedMemory memory(scratch, 100 * block + 123);
  EXPECT_EQ(scratch->counters().resident, 0);
  memory.acquire(3 * block - 5, 3 * block + 5, Access::read);
  EXPECT_EQ(memory.data()[3 * block], 0);
  memory.release(3 * block - 5, 3 * block + 5, Access::read);
  EXPECT_EQ(scratch->counters().read, 0U);
  EXPECT_EQ(scratch->counters().written, 0U);
}

// Offsets in the scratch file stay what direct reads and writes take, whatever was asked for.
TEST_P(PagedMemoryTest, RoomThatIsTakenBeforeIsUsed) {
  const auto scratch = disk(0);
  scratch->reserve(3 * block + 192);
  const int64_t taken = scratch->counters().size;
  EXPECT_EQ(taken % 4096, 0);
  PagedMemory first(scratch, 3 * block + 100);
  EXPECT_EQ(scratch->counters().size, taken);
  scratch->reserve(4096);
  PagedMemory second(scratch, block), third(scratch, 1000);
  for (PagedMemory* memory : {&first, &second, &third}) {
    memory->acquire(0, memory->bytes(), Access::fill);
    std::ranges::fill(std::span(memory->data(), memory->bytes()), 'x');
    memory->release(0, memory->bytes(), Access::fill);
    memory->acquire(0, memory->bytes(), Access::read);
    EXPECT_EQ(memory->data()[memory->bytes() - 1], 'x');
    memory->release(0, memory->bytes(), Access::read);
  }
  EXPECT_THROW(scratch->reserve(uint64_t{1} << 60), IoError);
}

TEST_P(PagedMemoryTest, WhatIsOverwrittenIsNotReadBefore) {
  const auto scratch = std::make_shared<Disk>(
      DiskOptions{.folder = folder_, .memory = 8 * static_cast<int64_t>(block), .engine = GetParam(), .keeps = false});
  PagedMemory memory(scratch, 4 * block);
  const auto fill = [&](size_t begin, size_t end, char value) {
    memory.acquire(begin, end, Access::fill);
    std::fill(memory.data() + begin, memory.data() + end, value);
    memory.release(begin, end, Access::fill);
    while (scratch->counters().resident > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  fill(0, 4 * block, 'a');
  fill(0, 4 * block, 'b');
  EXPECT_EQ(scratch->counters().read, 0U);
  fill(block / 2, 2 * block, 'c');  // of the first block a part is kept
  EXPECT_EQ(scratch->counters().read, block);
  memory.acquire(0, 4 * block, Access::read);
  EXPECT_EQ(std::string(memory.data(), 4 * block),
            std::string(block / 2, 'b') + std::string(block + block / 2, 'c') + std::string(2 * block, 'b'));
  memory.release(0, 4 * block, Access::read);
}

// Random uses of random ranges, of each kind, beside what is read ahead, against a copy that is always in memory.
TEST_P(PagedMemoryTest, IsWhatOrdinaryMemoryIs) {
  constexpr size_t bytes = 20 * block + 777;
  const auto scratch = disk(6 * block);
  PagedMemory memory(scratch, bytes);
  std::vector<char> twin(bytes, 0);
  std::mt19937 random(11);
  for (int turn = 0; turn < 400; ++turn) {
    const size_t begin = random() % bytes, end = std::min(bytes, begin + 1 + random() % (3 * block));
    const auto access = static_cast<Access>(random() % 3);
    const size_t ahead = random() % bytes;
    memory.prefetch(ahead, std::min(bytes, ahead + block));
    memory.acquire(begin, end, access);
    if (access == Access::fill) {
      std::fill(memory.data() + begin, memory.data() + end, static_cast<char>(turn));
      std::fill(twin.begin() + static_cast<std::ptrdiff_t>(begin), twin.begin() + static_cast<std::ptrdiff_t>(end),
                static_cast<char>(turn));
    } else {
      ASSERT_TRUE(
          std::equal(memory.data() + begin, memory.data() + end, twin.begin() + static_cast<std::ptrdiff_t>(begin)))
          << "turn " << turn;
      if (access == Access::update) memory.data()[begin] = twin[begin] = static_cast<char>(turn);
    }
    memory.release(begin, end, access);
  }
  const DiskCounters counters = scratch->counters();
  EXPECT_LE(counters.most_resident, static_cast<int64_t>(10 * block));  // the limit, or one use beside what has to stay
  EXPECT_GT(counters.read, 0U);
  EXPECT_GT(counters.written, 0U);
}

TEST_P(PagedMemoryTest, TravelsOnlyAsFarAsMemoryIsShort) {
  constexpr size_t blocks = 40;
  const auto traffic = [&](int64_t memory_limit) {
    const auto scratch = disk(memory_limit);
    PagedMemory memory(scratch, blocks * block);
    for (int step = 0; step < 5; ++step) {
      for (size_t i = 0; i < blocks; ++i) {
        memory.acquire(i * block, (i + 1) * block, Access::update);
        memory.data()[i * block] = static_cast<char>(memory.data()[i * block] + 1);
        memory.release(i * block, (i + 1) * block, Access::update);
      }
    }
    for (size_t i = 0; i < blocks; ++i) {
      memory.acquire(i * block, i * block + 1, Access::read);
      EXPECT_EQ(memory.data()[i * block], 5);
      memory.release(i * block, i * block + 1, Access::read);
    }
    return scratch->counters().written / block;
  };
  EXPECT_EQ(traffic(1000 * block), 0U);
  const auto half = traffic(40 * block), little = traffic(8 * block);  // half of it is the window
  EXPECT_NEAR(static_cast<double>(half), 5.0 * 20, 10);
  EXPECT_NEAR(static_cast<double>(little), 5.0 * 36, 10);
}

TEST_P(PagedMemoryTest, ServesSeveralThreads) {
  const auto scratch = disk(4 * block);
  PagedMemory first(scratch, 16 * block), second(scratch, 16 * block);
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      PagedMemory& memory = t % 2 == 0 ? first : second;
      const size_t half = static_cast<size_t>(t / 2) * 8 * block;
      for (int turn = 0; turn < 20; ++turn) {
        for (size_t i = 0; i < 8; ++i) {
          const size_t begin = half + i * block;
          memory.acquire(begin, begin + block, Access::update);
          EXPECT_EQ(memory.data()[begin + 17], turn);
          memory.data()[begin + 17] = static_cast<char>(turn + 1);
          memory.release(begin, begin + block, Access::update);
        }
      }
    });
  }
}

// One that waits for a block may find it gone again when its turn comes: another has used it meanwhile.
TEST_P(PagedMemoryTest, ServesSeveralThreadsThatWantTheSame) {
  const auto scratch = disk(0);
  PagedMemory memory(scratch, 8 * block);
  memory.acquire(0, 8 * block, Access::fill);
  for (size_t i = 0; i < 8; ++i) memory.data()[i * block + 3] = static_cast<char>(i);
  memory.release(0, 8 * block, Access::fill);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < 24; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int turn = 0; turn < 300; ++turn) {
        const size_t i = random() % 2;
        const auto access = t % 2 == 0 ? Access::read : Access::update;
        memory.acquire(i * block, (i + 1) * block, access);
        EXPECT_EQ(memory.data()[i * block + 3], static_cast<char>(i));
        memory.release(i * block, (i + 1) * block, access);
      }
    });
  }
}

TEST_P(PagedMemoryTest, GivesItsPlaceOnTheDiskBack) {
  const auto scratch = disk(2 * block);
  for (int i = 0; i < 10; ++i) {
    const PagedMemory one(scratch, 3 * block), other(scratch, 5 * block);
  }
  EXPECT_EQ(scratch->counters().size, static_cast<int64_t>(8 * block));
  const PagedMemory together(scratch, 8 * block);
  EXPECT_EQ(scratch->counters().size, static_cast<int64_t>(8 * block));
}

TEST_P(PagedMemoryTest, ThrowsWhatTheDiskFailedWithFromThenOn) {
  const auto scratch = disk(2 * block);
  PagedMemory memory(scratch, 8 * block);
  for (size_t i = 0; i < 8; ++i) {
    memory.acquire(i * block, (i + 1) * block, Access::fill);
    memory.data()[i * block] = 1;
    memory.release(i * block, (i + 1) * block, Access::fill);
  }
  while (scratch->counters().resident > static_cast<int64_t>(block)) std::this_thread::yield();
  {
    std::fstream file(scratch_of(folder_), std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(file);
    file.seekp(5 * block + 100);
    file.put(7);
  }
  EXPECT_THROW(memory.acquire(5 * block, 6 * block, Access::read), os::DamagedBlock);
  EXPECT_THROW(memory.acquire(0, 1, Access::read), os::DamagedBlock);
  EXPECT_NE(scratch->failure(), nullptr);
}

TEST_P(PagedMemoryTest, EndsTheProcessThatForgetsToUseIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        PagedMemory memory(disk(2 * block), block);
        memory.data()[0] = 1;
      },
      "");
}

INSTANTIATE_TEST_SUITE_P(Engines, PagedMemoryTest,
                         ::testing::Values(os::DiskQueue::Engine::best, os::DiskQueue::Engine::threads),
                         [](const auto& instance) {
                           return instance.param == os::DiskQueue::Engine::best ? "best" : "threads";
                         });

}  // namespace
}  // namespace tesserae::offload
