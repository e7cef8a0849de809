#include "tesserae/os/scratch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <random>

#include "tesserae/os/disk_queue.h"
#include "tesserae/os/reserved_pages.h"
#include "tests/os/scratch.h"

namespace tesserae::os {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Direction = BlockRequest::Direction;

constexpr size_t page = ScratchFile::alignment;

struct Pages {
  explicit Pages(size_t bytes) : size(bytes), data(static_cast<char*>(reserve_pages(bytes))) {
    open_pages(data, bytes);
  }
  ~Pages() { unreserve_pages(data, size); }
  size_t size;
  char* data;
};

using ScratchFileTest = Scratch;

TEST_F(ScratchFileTest, KeepsWhatWasWrittenAndHasNoName) {
  ScratchFile file(folder_ / "deeper");
  const uint64_t first = file.reserve(4 * page), second = file.reserve(page);
  EXPECT_EQ(second, first + 4 * page);
  Pages out(4 * page), in(4 * page);
  for (size_t i = 0; i < out.size; ++i) out.data[i] = static_cast<char>(i * 7);
  file.write(first, out.data, out.size);
  file.read(first, in.data, in.size);
  EXPECT_EQ(std::memcmp(in.data, out.data, in.size), 0);
  EXPECT_THAT(files().list(folder_ / "deeper"), IsEmpty());
}

TEST_F(ScratchFileTest, SaysWhatIsFreeWhereThereIsNoRoom) {
  ScratchFile file(folder_);
  file.reserve(page);
  try {
    file.reserve(uint64_t{1} << 52);
    FAIL() << "took four petabytes";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr(cat("no room for ", uint64_t{1} << 52, " bytes of scratch beside the 4096")));
  }
  EXPECT_EQ(file.reserve(page), page);  // what there is stays of use
}

TEST_F(ScratchFileTest, LeavesNothingBehindWhenItsProcessIsKilled) {
  const pid_t child = ::fork();
  if (child == 0) {
    ScratchFile file(folder_);
    Pages out(page);
    const uint64_t at = file.reserve(64 * page);
    for (uint64_t i = 0;; i = (i + 1) % 64) {
      file.write(at + i * page, out.data, page);
      if (i == 32) ::kill(::getpid(), SIGKILL);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  EXPECT_THAT(files().list(folder_), IsEmpty());
}

class DiskQueueTest : public Scratch, public ::testing::WithParamInterface<DiskQueue::Engine> {
 protected:
  void wait_for(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ == count; });
  }
  std::function<void(const std::exception_ptr&)> count() {
    return [this](const std::exception_ptr& failure) {
      const std::scoped_lock lock(mutex_);
      ++done_;
      if (failure != nullptr) failures_.push_back(failure);
      changed_.notify_all();
    };
  }

  ScratchFile file_{folder_};
  std::mutex mutex_;
  std::condition_variable changed_;
  int done_ = 0;
  std::vector<std::exception_ptr> failures_;
};

TEST_P(DiskQueueTest, CarriesManyBlocksBothWays) {
  constexpr size_t blocks = 200, size = 16 * page;
  Pages out(blocks * size), in(blocks * size);
  std::mt19937_64 random(3);
  for (size_t i = 0; i < out.size / 8; ++i) reinterpret_cast<uint64_t*>(out.data)[i] = random();
  const uint64_t at = file_.reserve(out.size);
  std::vector<uint64_t> sums(blocks);
  const auto queue = DiskQueue::make(file_, GetParam());
  for (size_t i = 0; i < blocks; ++i) {
    queue->submit({Direction::write, at + i * size, out.data + i * size, size, &sums[i], count()});
  }
  wait_for(blocks);
  for (size_t i = blocks; i-- > 0;) {
    queue->submit({Direction::read, at + i * size, in.data + i * size, size, &sums[i], count()});
  }
  wait_for(2 * blocks);
  EXPECT_TRUE(failures_.empty());
  EXPECT_EQ(std::memcmp(in.data, out.data, in.size), 0);
}

TEST_P(DiskQueueTest, TellsDamagedBlocksAndReadsBehindTheEnd) {
  Pages out(page);
  const uint64_t at = file_.reserve(page);
  uint64_t sum = 0;
  const auto queue = DiskQueue::make(file_, GetParam());
  queue->submit({Direction::write, at, out.data, page, &sum, count()});
  wait_for(1);
  out.data[100] = 1;
  file_.write(at, out.data, page);
  queue->submit({Direction::read, at, out.data, page, &sum, count()});
  wait_for(2);
  ASSERT_EQ(failures_.size(), 1U);
  EXPECT_THROW(std::rethrow_exception(failures_[0]), DamagedBlock);
  queue->submit({Direction::read, at + page, out.data, page, nullptr, count()});
  wait_for(3);
  ASSERT_EQ(failures_.size(), 2U);
  EXPECT_THROW(std::rethrow_exception(failures_[1]), IoError);
}

INSTANTIATE_TEST_SUITE_P(Engines, DiskQueueTest, ::testing::Values(DiskQueue::Engine::best, DiskQueue::Engine::threads),
                         [](const auto& instance) {
                           return instance.param == DiskQueue::Engine::best ? "best" : "threads";
                         });

}  // namespace
}  // namespace tesserae::os
