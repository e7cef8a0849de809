// Ranks that give up their groups and meet again, with real processes. New processes in place of lost ones:
// tests/train/recovery_test.cpp.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tesserae/base/error.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/comm/sub_fabric.h"
#include "tesserae/os/clock.h"
#include "tests/support/promise.h"
#include "tests/support/ranks.h"

namespace tesserae::comm {
namespace {

using tesserae::testing::report;
using tesserae::testing::run_ranks;

double now_in_seconds() {
  return std::chrono::duration<double>(os::now().time_since_epoch()).count();
}

void expect_sum(Group& group, double value, double sum) {
  const at::Tensor x = at::full({1000}, value);
  group.all_reduce(x);
  EXPECT_EQ(x[999].item<double>(), sum) << group.name();
}

}  // namespace

// args: backend, where (fault_test.cpp). The last rank leaves while the others wait for each other in groups of which
// it may be no member; three times.
RANK_MAIN(gives_up_and_meets_again) {
  const auto world = mesh::World::from_environment();
  FabricOptions options;
  options.backend = args[0];
  if (args[1] == "halves") options.host = std::to_string(world.rank() / 2);
  const auto fabric = Fabric::connect(world, options);
  const int rank = fabric->rank(), last = fabric->size() - 1;
  const auto pair = sub_fabric(fabric, {rank / 2 * 2, rank / 2 * 2 + 1});
  for (int epoch = 1; epoch <= 3; ++epoch) {
    expect_sum(fabric->everyone(), rank, 6);
    expect_sum(pair->everyone(), 1, 2);
    Group& reducing = fabric->group(fabric->everyone().members(), Traffic::reduce);
    fabric->everyone().barrier();
    if (rank == 0) {
      // Waits for one that waits for another: nobody calls with it.
      Ticket ticket = fabric->lane(Traffic::reduce).submit([&] { reducing.barrier(); });
      EXPECT_THROW(ticket.wait(), CommError);
    } else if (rank < last) {
      EXPECT_THROW(pair->everyone().barrier({}, "alone"), CommError);
    } else {
      os::sleep_for(std::chrono::milliseconds(300));
      report("left_at", now_in_seconds());
    }
    fabric->reconnect(epoch);
    EXPECT_EQ(fabric->epoch(), epoch);
    EXPECT_EQ(pair->epoch(), epoch);
    EXPECT_EQ(pair->counters().bytes(), 0u) << "the groups of before do not count";
    report("met_at", now_in_seconds());
    fabric->forget_broken();
  }
  expect_sum(fabric->everyone(), rank, 6);
  expect_sum(pair->everyone(), 1, 2);
}

// Of four ranks the third is alone in its barrier, and the first on its lane.
TEST(Reconnect, RanksThatWaitForOthersGiveUpWithThem) {
  for (const auto& [backend, where] : std::vector<std::pair<std::string, std::string>>{
           {"gloo", "together"}, {"shm", "together"}, {"gloo", "halves"}, {"shm", "halves"}}) {
    const auto results = run_ranks("gives_up_and_meets_again", 4, {backend, where});
    ASSERT_TRUE(results.all_succeeded()) << backend << " " << where << results.text();
    double met = 0;
    for (int rank = 0; rank < 4; ++rank) met = std::max(met, results[rank].value("met_at"));
    std::printf("%s %s: met again after %.2f s\n", backend.c_str(), where.c_str(), met - results[3].value("left_at"));
    EXPECT_LT(met - results[3].value("left_at"), 30);
  }
}

// Rank 1 serves no store and never comes; rank 0 is told so while it waits.
RANK_MAIN(meets_until_it_is_called_off) {
  FabricOptions options;
  options.cancelled = [asked = 0]() mutable { return ++asked > 20; };
  if (mesh::World::from_environment().rank() == 1) return;
  try {
    Fabric::connect(mesh::World::from_environment(), options);
    ADD_FAILURE() << "it met nobody";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("another rank was lost while the ranks met"), std::string::npos);
  }
}

TEST(Reconnect, AMeetingCanBeCalledOff) {
  const auto results = run_ranks("meets_until_it_is_called_off", 2);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

TEST(Reconnect, AFabricWithoutAStoreHasNobodyToMeet) {
  EXPECT_THROW(Fabric::null(mesh::World::single_host(0, 4))->reconnect(1), InvalidArgument);
}

}  // namespace tesserae::comm
