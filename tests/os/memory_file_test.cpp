#include "tesserae/os/memory_file.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <new>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/os/futex.h"
#include "tesserae/os/process.h"

namespace tesserae::os {
namespace {

TEST(MemoryFile, IsSharedWithAProcessThatKnowsOwnerAndDescriptor) {
  MemoryFile ours = MemoryFile::create("test", 1 << 20);
  auto* const word = new (ours.data()) std::atomic<uint32_t>(0);
  const pid_t child = ::fork();
  if (child == 0) {
    const MemoryFile theirs = MemoryFile::open(parent_id(), ours.descriptor(), "test", 1 << 20);
    auto* const same = static_cast<std::atomic<uint32_t>*>(theirs.data());
    same->store(7);
    wake_all(*same);
    ::raise(SIGKILL);  // leaves nothing behind
  }
  while (word->load() == 0) wait_on(*word, 0, std::chrono::milliseconds(1000));
  EXPECT_EQ(word->load(), 7u);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

TEST(MemoryFile, MayHaveALabelLongerThanTheSystemAllows) {
  const std::string label(1000, 'x');
  const MemoryFile ours = MemoryFile::create(label, 4096);
  EXPECT_EQ(MemoryFile::open(process_id(), ours.descriptor(), label, 4096).size(), 4096u);
}

TEST(MemoryFile, OfAnotherSizeOrGoneIsAnIoError) {
  MemoryFile ours = MemoryFile::create("test", 8192);
  const int descriptor = ours.descriptor();
  EXPECT_THROW(MemoryFile::open(process_id(), descriptor, "test", 4096), IoError);
  EXPECT_EQ(MemoryFile::open(process_id(), descriptor, "test", 8192).size(), 8192u);
  ours.close_descriptor();
  EXPECT_THROW(MemoryFile::open(process_id(), descriptor, "test", 8192), IoError);
}

TEST(MemoryFile, KeepsItsSize) {
  const MemoryFile ours = MemoryFile::create("test", 8192);
  EXPECT_NE(::ftruncate(ours.descriptor(), 0), 0) << "a peer's access would raise SIGBUS";
}

TEST(MemoryFile, NothingElseThatTheOwnerHasOpenIsMapped) {
  const auto refused = [](int descriptor) {
    EXPECT_THROW(MemoryFile::open(process_id(), descriptor, "test", 8192), IoError);
  };
  const MemoryFile other = MemoryFile::create("another label", 8192);
  refused(other.descriptor());
  const Descriptor unsealed(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), 8192), 0);
  refused(unsealed.get());
  char name[] = "/tmp/memory-file-XXXXXX";
  const Descriptor file(::mkstemp(name));
  ASSERT_EQ(::ftruncate(file.get(), 8192), 0);
  refused(file.get());
  ::unlink(name);
}

TEST(Futex, AWordThatHasChangedIsNotWaitedFor) {
  const std::atomic<uint32_t> word = 1;
  const auto begin = std::chrono::steady_clock::now();
  wait_on(word, 0, std::chrono::minutes(10));
  wait_on(word, 1, std::chrono::milliseconds(1));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(1));
}

}  // namespace
}  // namespace tesserae::os
