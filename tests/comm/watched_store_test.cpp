#include "tesserae/comm/liveness/watched_store.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>

#include "tesserae/comm/error.h"
#include "tesserae/os/clock.h"

namespace tesserae::comm {
namespace {

using std::chrono::milliseconds;

/// A store whose process had no processor for a while: one answer takes longer than a question is waited for.
class StallsOnce final : public c10d::PrefixStore {
 public:
  explicit StallsOnce(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("", std::move(store)) {}
  std::vector<uint8_t> get(const std::string& key) override {
    stall();
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    stall();
    return PrefixStore::multiGet(keys);
  }
  std::atomic<int> asked = 0;

 private:
  void stall() {
    if (asked++ == 0) os::sleep_for(milliseconds(2500));
  }
};

class WatchedStoreTest : public ::testing::Test {
 protected:
  WatchedStore watched(c10::intrusive_ptr<c10d::Store> store, milliseconds deadline) {
    return {{"a group", {0}, deadline, liveness_, std::make_shared<TimeLimiter>()}, "", std::move(store)};
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();

 private:
  std::shared_ptr<Liveness> make() {
    const auto signs = c10::make_intrusive<c10d::HashStore>();
    Liveness::introduce(0, signs);
    return std::make_shared<Liveness>(mesh::World::single_host(0, 1), signs, /*server=*/-1);
  }
  const std::shared_ptr<Liveness> liveness_ = make();
};

TEST_F(WatchedStoreTest, AnAnswerThatIsSlowIsNotADeadlineThatHasPassed) {
  for (const bool several : {false, true}) {
    const auto slow = c10::make_intrusive<StallsOnce>(store_);
    WatchedStore store = watched(slow, std::chrono::minutes(5));
    store.set("key", std::vector<uint8_t>{1, 2});
    const std::vector<uint8_t> value = several ? store.multiGet({"key"}).front() : store.get("key");
    EXPECT_EQ(value, (std::vector<uint8_t>{1, 2}));
    EXPECT_EQ(slow->asked, 2);
  }
}

TEST_F(WatchedStoreTest, WhatNobodySetsIsATimeout) {
  WatchedStore store = watched(store_, milliseconds(50));
  EXPECT_THROW(store.get("key"), Timeout);
  EXPECT_THROW(store.wait({"key"}, milliseconds(20)), Timeout);
}

}  // namespace
}  // namespace tesserae::comm
