#include "tesserae/os/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tesserae/base/error.h"
#include "tesserae/os/process.h"

namespace tesserae::os {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Every test has a name of its own, taken away at both ends.
class SharedMemoryTest : public ::testing::Test {
 protected:
  SharedMemoryTest() { SharedMemory::remove(name_); }
  ~SharedMemoryTest() override { SharedMemory::remove(name_); }
  const std::string name_ = "tesserae-test-" + std::to_string(process_id());
};

TEST_F(SharedMemoryTest, WhatOthersMayWriteIsNotOpened) {
  const SharedMemory memory = SharedMemory::create(name_, 100);
  ASSERT_EQ(::chmod(("/dev/shm/" + name_).c_str(), 0622), 0);
  EXPECT_THROW(SharedMemory::open(name_), IoError);
  ASSERT_EQ(::chmod(("/dev/shm/" + name_).c_str(), 0600), 0);
  EXPECT_NO_THROW(SharedMemory::open(name_));
  if (::geteuid() != 0) return;  // only root can give a file away
  ASSERT_EQ(::chown(("/dev/shm/" + name_).c_str(), 65534, 65534), 0);
  EXPECT_THROW(SharedMemory::open(name_), IoError);
}

TEST_F(SharedMemoryTest, IsSharedBetweenProcesses) {
  const size_t size = 100'000;
  const SharedMemory memory = SharedMemory::create(name_, size);
  const auto* bytes = static_cast<const unsigned char*>(memory.data());
  EXPECT_EQ(memory.size(), size);
  EXPECT_TRUE(std::all_of(bytes, bytes + size, [](unsigned char byte) { return byte == 0; }));

  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const SharedMemory same = SharedMemory::open(name_);
    std::memset(same.data(), 42, same.size());
    ::_exit(same.size() == size ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::all_of(bytes, bytes + size, [](unsigned char byte) { return byte == 42; }));
}

TEST_F(SharedMemoryTest, OutlivesItsNameButNotItsUsers) {
  SharedMemory memory = SharedMemory::create(name_, 10);
  static_cast<char*>(memory.data())[9] = 'x';
  EXPECT_TRUE(SharedMemory::remove(name_));
  EXPECT_FALSE(SharedMemory::remove(name_));
  EXPECT_EQ(static_cast<char*>(memory.data())[9], 'x');
  EXPECT_THROW(SharedMemory::open(name_), IoError);
  memory = SharedMemory::create(name_, 20);
  EXPECT_EQ(memory.size(), 20u);
  EXPECT_EQ(static_cast<char*>(memory.data())[9], 0);
}

TEST_F(SharedMemoryTest, RefusesWhatItCannotGive) {
  const SharedMemory memory = SharedMemory::create(name_, 10);
  try {
    SharedMemory::create(name_, 10);
    FAIL() << "the name was taken";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(name_), HasSubstr("File exists")));
  }
  EXPECT_THROW(SharedMemory::create("a/b", 10), InvalidArgument);
  EXPECT_THROW(SharedMemory::create("", 10), InvalidArgument);
  EXPECT_THROW(SharedMemory::create(name_ + "-empty", 0), InvalidArgument);
}

TEST_F(SharedMemoryTest, NamesAreFoundByTheirBeginning) {
  EXPECT_TRUE(SharedMemory::names(name_).empty());
  const SharedMemory memory = SharedMemory::create(name_, 10);
  EXPECT_EQ(SharedMemory::names(name_), std::vector<std::string>{name_});
  SharedMemory::remove(name_);
  EXPECT_TRUE(SharedMemory::names(name_).empty()) << "though it is still mapped";
}

TEST_F(SharedMemoryTest, AFullFileSystemIsAnErrorNotACrash) {
  struct statvfs room {};
  if (::statvfs("/dev/shm", &room) != 0 || room.f_blocks == 0) GTEST_SKIP() << "/dev/shm has no limit here";
  const size_t too_much = static_cast<size_t>(room.f_blocks) * room.f_frsize + (size_t{1} << 30);
  EXPECT_THROW(SharedMemory::create(name_, too_much), IoError);
  EXPECT_FALSE(SharedMemory::remove(name_)) << "a failed one leaves no name behind";
}

}  // namespace
}  // namespace tesserae::os
