#include "tesserae/monitor/exchange.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tesserae::monitor {
namespace {

using std::chrono::milliseconds;

/// Takes its time for a request, or fails, as often as it is told to.
class BadStore : public c10d::HashStore {
 public:
  std::atomic<int> slow = 0, broken = 0, asked = 0;

  std::vector<uint8_t> get(const std::string& key) override {
    misbehave();
    return HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    misbehave();
    return HashStore::check(keys);
  }

 private:
  void misbehave() {
    ++asked;
    if (broken > 0 && --broken >= 0) throw std::runtime_error("the connection was closed");
    if (slow > 0 && --slow >= 0) os::sleep_for(milliseconds(400));
  }
};

TEST(Exchange, GoesOnOnceTheStoreAnswersAgain) {
  const auto store = c10::make_intrusive<BadStore>();
  Exchange leader(store, 0, 2), other(store, 1, 2, milliseconds(100));
  leader.write(Wish{.generation = 5});
  ASSERT_TRUE(other.read_wish());
  store->slow = 1;
  EXPECT_FALSE(other.read_wish()) << "nobody waits for longer than that";
  const int asked = store->asked;
  EXPECT_FALSE(other.read_wish());
  EXPECT_EQ(store->asked, asked) << "one request is under way";
  os::sleep_for(milliseconds(600));
  ASSERT_TRUE(other.read_wish());
  EXPECT_EQ(other.read_wish()->generation, 5);
  store->broken = 1;
  EXPECT_FALSE(other.read_wish());
  EXPECT_FALSE(other.read_wish()) << "it is left alone for a while";
  os::sleep_for(milliseconds(150));
  EXPECT_TRUE(other.read_wish());
  other.write(Report{.number = 3, .generation = 5});
  const auto reports = leader.read_reports(5);
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_EQ(reports[0].second.number, 3);
}

TEST(Exchange, ReportsOfManyRanksCome) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Exchange leader(store, 0, 200);
  for (const int rank : {1, 63, 64, 65, 128, 199}) Exchange(store, rank, 200).write(Report{.number = rank});
  std::vector<int> ranks;
  for (const auto& [rank, report] : leader.read_reports(0)) ranks.push_back(rank);
  EXPECT_EQ(ranks, (std::vector{1, 63, 64, 65, 128, 199}));
}

}  // namespace
}  // namespace tesserae::monitor
