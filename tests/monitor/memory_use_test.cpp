#include "tesserae/monitor/memory_use.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <numeric>

namespace tesserae::monitor {
namespace {

/// Memory that a child has touched, too, and keeps until this is destroyed.
class Shared {
 public:
  explicit Shared(size_t bytes) : bytes_(bytes), ends_(), touched_() {
    memory_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_EQ(::pipe(ends_), 0);
    EXPECT_EQ(::pipe(touched_), 0);
    std::memset(memory_, 1, bytes_);
    child_ = ::fork();
    char byte = 0;
    if (child_ == 0) {
      ::close(ends_[1]);
      std::memset(memory_, 2, bytes_);
      static_cast<void>(!::write(touched_[1], &byte, 1));
      static_cast<void>(!::read(ends_[0], &byte, 1));
      ::_exit(0);
    }
    EXPECT_EQ(::read(touched_[0], &byte, 1), 1);
  }
  ~Shared() {
    for (const int end : {ends_[0], ends_[1], touched_[0], touched_[1]}) ::close(end);
    ::waitpid(child_, nullptr, 0);
    ::munmap(memory_, bytes_);
  }

 private:
  size_t bytes_;
  void* memory_ = nullptr;
  int ends_[2], touched_[2];
  pid_t child_ = 0;
};

TEST(MemoryUse, ThePeakHasOnlyThePartOfSharedMemoryThatTheRankHas) {
  constexpr double shared = 256 << 20;
  const Shared memory(static_cast<size_t>(shared));
  MemoryUse use;
  complete(use, c10::kCPU, 1, std::nullopt);
  const double held = std::accumulate(use.bytes.begin(), use.bytes.end(), 0.0);
  EXPECT_GE(use.peak, held);
  EXPECT_LT(use.peak - held, shared / 4) << "half of it belongs to the child";
}

}  // namespace
}  // namespace tesserae::monitor
