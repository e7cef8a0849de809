#include "tesserae/comm/succession.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/os/faulty_files.h"
#include "tests/os/scratch.h"

namespace tesserae::comm {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

class SuccessionTest : public os::Scratch {
 protected:
  static Claim by(int host, int64_t generation, std::vector<int> without = {}) {
    return {.generation = generation, .host = host, .address = "10.0.0.1", .port = 7777, .without = std::move(without)};
  }

  Succession job{folder_, "7f3a"};
};

TEST_F(SuccessionTest, TheNewestClaimSaysWhoDecides) {
  EXPECT_EQ(job.newest(), std::nullopt);
  EXPECT_TRUE(job.claim(by(0, 0)));
  EXPECT_EQ(job.newest(), by(0, 0));
  for (int generation = 1; generation <= 10; ++generation) EXPECT_TRUE(job.claim(by(2, generation, {0, 1})));
  EXPECT_EQ(job.newest(), by(2, 10, {0, 1})) << "by number, not by name";
  Claim over = by(2, 11);
  over.status = 75;
  EXPECT_TRUE(job.claim(over));
  EXPECT_EQ(job.newest(), over);
}

TEST_F(SuccessionTest, AGenerationIsClaimedOnce) {
  ASSERT_TRUE(job.claim(by(0, 0)));
  ASSERT_TRUE(job.claim(by(1, 1)));
  EXPECT_FALSE(job.claim(by(0, 1, {1})));
  EXPECT_EQ(job.newest(), by(1, 1));
  EXPECT_THAT(os::files().list(folder_), SizeIs(2)) << "no draft is left";
}

TEST_F(SuccessionTest, OfThoseThatClaimAtATimeOneIsGranted) {
  ASSERT_TRUE(job.claim(by(0, 0)));
  for (int generation = 1; generation <= 20; ++generation) {
    std::atomic<int> granted = 0, ready = 0;
    std::vector<std::thread> hosts;
    for (int host = 0; host < 4; ++host) {
      hosts.emplace_back([&, host] {
        ++ready;
        while (ready < 4) std::this_thread::yield();
        granted += job.claim(by(host, generation)) ? 1 : 0;
      });
    }
    for (std::thread& host : hosts) host.join();
    EXPECT_EQ(granted, 1) << generation;
  }
}

TEST_F(SuccessionTest, ClaimsOfOtherJobsAreNone) {
  const Succession other(folder_, "7f3ab");
  ASSERT_TRUE(other.claim(by(0, 0)));
  EXPECT_EQ(job.newest(), std::nullopt);
  ASSERT_TRUE(job.claim(by(0, 0)));
  job.clear();
  EXPECT_EQ(job.newest(), std::nullopt);
  EXPECT_EQ(other.newest(), by(0, 0));
}

TEST_F(SuccessionTest, WhoComesBackWhenAllIsOverClaimsNothing) {
  ASSERT_TRUE(job.claim(by(0, 0)));
  ASSERT_TRUE(job.claim(by(1, 1, {0})));
  job.clear();
  EXPECT_FALSE(job.claim(by(0, 1, {1}))) << "it was the first host, and has heard nothing";
  EXPECT_THAT(os::files().list(folder_), IsEmpty());
}

TEST_F(SuccessionTest, AClaimWhoseAnswerWasLostIsGrantedToWhoMadeIt) {
  ASSERT_TRUE(job.claim(by(0, 0)));
  os::FaultyFiles faulty(os::files());
  int operations = 0;
  {
    const os::ScopedFiles scope(faulty);
    faulty.fail_at(0);
    ASSERT_TRUE(job.claim(by(1, 1)));
    operations = faulty.operations();
  }
  ASSERT_GT(operations, 4);
  for (int failing = 1; failing <= operations; ++failing) {
    const int64_t generation = failing + 1;
    {
      const os::ScopedFiles scope(faulty);
      faulty.fail_at(failing);
      EXPECT_THROW(job.claim(by(1, generation)), IoError) << failing;
    }
    EXPECT_TRUE(job.claim(by(1, generation))) << failing;
    EXPECT_FALSE(job.claim(by(2, generation))) << failing;
    EXPECT_EQ(job.newest(), by(1, generation));
  }
  job.clear();
  EXPECT_THAT(os::files().list(folder_), IsEmpty());
}

TEST_F(SuccessionTest, AClaimThatCannotBeReadSaysSo) {
  ASSERT_TRUE(job.claim(by(0, 0)));
  os::files().write(folder_ / os::files().list(folder_).front(), "");
  EXPECT_THROW(job.newest(), IoError);
}

TEST_F(SuccessionTest, StorageThatIsGoneDecidesNothing) {
  os::files().remove_all(folder_);
  EXPECT_THROW(job.newest(), IoError);
  EXPECT_THROW(job.claim(by(1, 1)), IoError);
  job.clear();
}

}  // namespace
}  // namespace tesserae::comm
