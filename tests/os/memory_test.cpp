#include "tesserae/os/memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/os/process.h"
#include "tests/checkpoint/memory_files.h"

namespace tesserae::os {
namespace {

constexpr uint64_t MB = 1 << 20;

TEST(Memory, SeesWhatThisProcessTouches) {
  const ProcessMemory before = process_memory();
  EXPECT_GT(before.of_files, 0U);
  EXPECT_LT(before.of_files, before.proportional);
  const size_t size = 64 * MB;
  void* block = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  std::memset(block, 1, size);
  const ProcessMemory during = process_memory();
  ::munmap(block, size);
  const ProcessMemory after = process_memory();

  EXPECT_GE(during.resident, before.resident + 60 * MB);
  EXPECT_GE(during.proportional, before.proportional + 60 * MB);
  EXPECT_LE(during.proportional, during.resident);
  EXPECT_LE(after.resident, during.resident - 60 * MB);
  EXPECT_GE(after.peak_resident + 4 * MB, during.resident) << "the kernel counts in batches";
  EXPECT_GE(peak_resident() + 4 * MB, during.resident);
}

TEST(Memory, RecentPeaksAreForgottenAndTheProcessOnesAreNot) {
  recent_memory();
  const uint64_t before = recent_memory().peak;
  const size_t size = 64 * MB;
  void* block = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  std::memset(block, 1, size);
  ::munmap(block, size);
  const RecentMemory during = recent_memory();
  EXPECT_GE(during.peak, before + 60 * MB);
  EXPECT_GE(during.peak, during.resident + 60 * MB) << "it is gone already";
  EXPECT_LE(recent_memory().peak, during.peak - 60 * MB) << "since the last call there was nothing";
  EXPECT_GE(peak_resident(), during.peak);
  EXPECT_GE(process_memory().peak_resident, during.peak);
}

// In a child, since it is the process's for good.
TEST(Memory, FreedMemoryIsKeptOnDemandAndGivenBackOnDemand) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
  GTEST_SKIP() << "malloc is another one here, which cannot be told";
#endif
  const pid_t child = ::fork();
  if (child == 0) {
    for (const char* const variable : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}) {
      ::unsetenv(variable);
    }
    keep_freed_memory();
    const size_t size = 16 * MB;
    const uint64_t before = process_memory().resident;
    for (int i = 0; i < 3; ++i) {
      std::vector<void*> blocks;
      for (int k = 0; k < 4; ++k) blocks.push_back(std::memset(std::malloc(size), 1, size));
      for (void* block : blocks) std::free(block);
    }
    const uint64_t kept = process_memory().resident;
    give_back_freed_memory();
    const uint64_t given_back = process_memory().resident;
    ::_exit(kept < before + 60 * MB ? 1 : given_back > before + 4 * MB ? 2 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "1: not kept, 2: not given back";
}

TEST(Memory, SharedPagesAreDividedAmongThoseWhoMapThem) {
  const size_t size = 32 * MB;
  void* block = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  std::memset(block, 1, size);
  void* again = ::mremap(block, 0, size, MREMAP_MAYMOVE);  // the same pages, mapped a second time
  ASSERT_NE(again, MAP_FAILED);
  std::memset(again, 2, size);
  const ProcessMemory memory = process_memory();
  EXPECT_GE(memory.resident, memory.proportional + 28 * MB);
  ::munmap(block, size);
  ::munmap(again, size);
}

TEST(Memory, SeesAnotherProcess) {
  Process child = Process::spawn({.arguments = {"sleep", "1000"}, .die_with_parent = true});
  EXPECT_GT(process_memory(child.id()).resident, 0u);
  EXPECT_THROW(process_memory(0x3fffffff), IoError) << "larger than any process id";
}

TEST(Memory, KnowsTheHost) {
  const HostMemory memory = host_memory();
  EXPECT_GT(memory.total, 64 * MB);
  EXPECT_GT(memory.available, 0u);
  EXPECT_LE(memory.available, memory.total);
  EXPECT_LT(process_memory().proportional, memory.total);
}

/// What a machine of 1,000 MB says, of which 600 are available.
class MachineOf1000 {
 public:
  MachineOf1000() { write("/proc/meminfo", "MemTotal: 1024000 kB\nMemAvailable: 614400 kB\n"); }

  void write(const Path& path, const std::string& text) {
    memory_.make_directories(path.parent_path());
    memory_.create(path)->write(text);
  }
  /// The group, in MB.
  void group(const Path& path, const std::string& version, uint64_t limit, uint64_t used, uint64_t of_files) {
    const bool second = version == "v2";
    write(path / (second ? "memory.max" : "memory.limit_in_bytes"), cat(limit * MB, "\n"));
    write(path / (second ? "memory.current" : "memory.usage_in_bytes"), cat(used * MB, "\n"));
    const char* const prefix = second ? "" : "total_";
    write(path / "memory.stat", cat("anon 5\n", prefix, "inactive_file ", of_files * MB / 4, "\n", prefix,
                                    "active_file ", of_files * MB / 4 * 3, "\n"));
  }

 private:
  tesserae::testing::MemoryFiles memory_;
  ScopedFiles scoped_{memory_};
};

void expect_host(uint64_t total, uint64_t available) {
  EXPECT_EQ(host_memory().total, total * MB);
  EXPECT_EQ(host_memory().available, available * MB);
}

TEST(Memory, OfAHostIsWhatControlGroupsLeaveOfIt) {
  {
    MachineOf1000 machine;
    expect_host(1000, 600);
    EXPECT_EQ(group_memory_limit(), std::nullopt);
  }
  {  // a container that has read its data: it is their pages that fill it
    MachineOf1000 machine;
    machine.write("/proc/self/cgroup", "0::/\n");
    machine.group("/sys/fs/cgroup", "v2", 400, 390, 360);
    expect_host(400, 370);
    EXPECT_EQ(group_memory_limit(), 400 * MB);
  }
  {  // a job of Slurm: not the group itself, but one around it is limited, and another one by less
    MachineOf1000 machine;
    machine.write("/proc/self/cgroup", "0::/slurm/job_1/step_0/task_0\n");
    machine.group("/sys/fs/cgroup/slurm/job_1/step_0", "v2", 500, 100, 0);
    machine.group("/sys/fs/cgroup/slurm", "v2", 800, 700, 0);
    expect_host(500, 100);
  }
  {
    MachineOf1000 machine;
    machine.write("/proc/self/cgroup", "5:cpu:/a\n4:memory:/a/b\n");
    machine.group("/sys/fs/cgroup/memory/a", "v1", 300, 200, 100);
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    expect_host(300, 200);
  }
}

}  // namespace
}  // namespace tesserae::os
