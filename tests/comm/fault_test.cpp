// Ranks that are killed, stopped, or end in the middle of an operation, with real processes.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "tesserae/base/error.h"
#include "tesserae/comm/fabric.h"
#include "tests/comm/fault.h"
#include "tests/support/promise.h"
#include "tests/support/ranks.h"

namespace tesserae::comm {

namespace {

using tesserae::testing::RankJob;
using tesserae::testing::RankResults;
using tesserae::testing::report;
using tesserae::testing::run_ranks;
using tesserae::testing::run_side_by_side;

// What a victim does to itself, from another thread, while its operation is under way.
void suffer(const std::string& fate) {
  std::thread([fate] {
    os::sleep_for(std::chrono::milliseconds(100));
    report("fell_at", seconds_now());
    std::raise(fate == "killed" ? SIGKILL : SIGSTOP);
  }).detach();
}

void run_verb(const std::string& verb, Group& group, const at::Tensor& buffer) {
  if (verb == "all_gather") return group.all_gather(buffer);
  if (verb == "reduce_scatter") return group.reduce_scatter(buffer);
  if (verb == "receive") return group.exchange({}, {{1, buffer}});
  if (verb == "barrier") return group.barrier();
  group.all_reduce(buffer);
}

}  // namespace

// args: verb, victim, fate, deadline in seconds, where, backend. Where: "together" on one host; "apart", the last rank
// is on a host of its own; "halves", two hosts with as many ranks; "in_turn", the last rank waits twice as long.
RANK_MAIN(runs_until_a_rank_falls) {
  const auto world = mesh::World::from_environment();
  FabricOptions options;
  options.backend = args[5];
  options.deadline = std::chrono::seconds(std::stoi(args[3]));
  if (args[4] == "apart") options.host = world.rank() == world.size() - 1 ? "far" : "near";
  if (args[4] == "halves") options.host = std::to_string(world.rank() / 2);
  if (args[4] == "in_turn" && world.rank() == world.size() - 1) options.deadline *= 2;
  const auto fabric = Fabric::connect(world, options);
  auto& group = fabric->group(fabric->everyone().members(), Traffic::gather);
  const auto buffer = at::zeros({group.size() * (int64_t{1} << 20)});
  group.barrier();
  if (fabric->rank() == std::stoi(args[1])) suffer(args[2]);
  try {
    for (;;) run_verb(args[0], group, buffer);
  } catch (const PeerLost& lost) {
    report("caught_at", seconds_now());
    report("lost", first_of(lost.ranks));
    std::printf("%s\n", lost.what());
  } catch (const Timeout& timeout) {
    report("caught_at", seconds_now());
    report("silent", first_of(timeout.silent));
    std::printf("%s\n", timeout.what());
  }
}

RANK_MAIN(leaves_by_an_exception) {
  FabricOptions options;
  options.backend = args[0];
  const auto fabric = Fabric::connect(mesh::World::from_environment(), options);
  auto& group = fabric->group(fabric->everyone().members(), Traffic::gather);
  const auto buffer = at::zeros({group.size() * (int64_t{1} << 20)});
  group.barrier();
  if (fabric->rank() == 1) {
    report("left_at", seconds_now());
    throw std::runtime_error("out of memory");
  }
  try {
    run_verb(args[1], group, buffer);
  } catch (const PeerLost& lost) {
    report("caught_at", seconds_now());
    report("lost", first_of(lost.ranks));
    std::printf("%s\n", lost.what());
  }
}

struct Fall {
  std::string verb;
  int victim;
  std::string where = "together";
  std::string backend = "gloo";
};

constexpr int repeats = 5;

// The promises of docs/faults.md: a host's processes are watched; a host that fell silent is given time, and those of
// two halves learn of it from each other.
double promised_seconds(const Fall& fall) {
  return fall.where == "apart" ? 2 : 1;
}

std::string name_of(const ::testing::TestParamInfo<Fall>& info) {
  return info.param.verb + "_rank" + std::to_string(info.param.victim) + "_" + info.param.where + "_" +
         info.param.backend;
}

class KilledRank : public ::testing::TestWithParam<Fall> {};

TEST_P(KilledRank, IsNamedByAllSurvivors) {
  const auto& fall = GetParam();
  std::vector<double> seconds;  // until the last survivor knew
  for (int i = 0; i < repeats; ++i) {
    const auto results = run_ranks("runs_until_a_rank_falls", 4,
                                   {fall.verb, std::to_string(fall.victim), "killed", "40", fall.where, fall.backend});
    double last = 0;
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == fall.victim) continue;
      ASSERT_TRUE(results[rank].exit.success()) << results.text();
      ASSERT_NE(results[rank].output.find("lost="), std::string::npos) << results.text();
      EXPECT_EQ(results[rank].value("lost"), fall.victim) << results.text();
      last = std::max(last, results[rank].value("caught_at") - results[fall.victim].value("fell_at"));
    }
    seconds.push_back(last);
  }
  expect_promise(seconds, promised_seconds(fall));
}

INSTANTIATE_TEST_SUITE_P(Fault, KilledRank,
                         ::testing::Values(Fall{"all_gather", 2}, Fall{"reduce_scatter", 1}, Fall{"all_reduce", 0},
                                           Fall{"all_gather", 3, "apart"}, Fall{"all_gather", 2, "together", "shm"},
                                           Fall{"reduce_scatter", 0, "together", "shm"},
                                           Fall{"all_gather", 3, "halves", "shm"},
                                           Fall{"reduce_scatter", 0, "halves", "shm"}),
                         name_of);

// Rank 0 serves the store, on which the knowledge about the others depends. Who gives up on it first ends before the
// others do, and cannot say goodbye: it is not the one to name.
TEST(Fault, ARankThatIsStoppedIsNamedAtTheDeadline) {
  const std::vector<Fall> falls = {{"all_gather", 1, "together", "gloo"},    {"reduce_scatter", 0, "together", "gloo"},
                                   {"all_reduce", 1, "together", "shm"},     {"all_gather", 1, "halves", "shm"},
                                   {"reduce_scatter", 0, "in_turn", "gloo"}, {"reduce_scatter", 0, "in_turn", "shm"}};
  std::vector<RankJob> jobs;
  for (const auto& fall : falls) {
    RankJob job;
    job.main = "runs_until_a_rank_falls";
    job.ranks = fall.where == "halves" ? 4 : 3;
    job.args = {fall.verb,   std::to_string(fall.victim), "stopped", std::to_string(kDeadline.count()), fall.where,
                fall.backend};
    job.left_behind = {fall.victim};
    jobs.push_back(job);
  }
  const auto ends = run_side_by_side(jobs);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto& [verb, victim, where, backend] = falls[i];
    SCOPED_TRACE(cat(verb, " over ", backend, ", rank ", victim, ", ", where));
    for (int rank = 0; rank < jobs[i].ranks; ++rank) {
      if (rank == victim) continue;
      const auto& result = ends[i][rank];
      ASSERT_TRUE(result.exit.success()) << ends[i].text();
      EXPECT_EQ(result.value("silent"), victim) << ends[i].text();
      const double took = result.value("caught_at") - ends[i][victim].value("fell_at");
      const auto deadline = static_cast<double>(kDeadline.count());
      EXPECT_GT(took, deadline / 2);
      EXPECT_LT(took, deadline * 10) << ends[i].text();
      std::printf("%s, %s, %s: rank %d knew after %.2f s\n", verb.c_str(), backend.c_str(), where.c_str(), rank, took);
    }
  }
}

// A goodbye on the way out is polite, and yet its peers wait for it: over every transport they hear within a second.
TEST(Fault, ARankThatEndsByAnExceptionIsNamed) {
  for (const std::string backend : {"gloo", "shm"}) {
    std::vector<double> seconds;
    for (const std::string verb : {"barrier", "all_gather", "reduce_scatter", "receive", "receive"}) {
      const auto results = run_ranks("leaves_by_an_exception", 3, {backend, verb});
      EXPECT_EQ(results[1].exit.code, 1);
      for (const int rank : {0, 2}) {
        ASSERT_TRUE(results[rank].exit.success()) << results.text();
        EXPECT_EQ(results[rank].value("lost"), 1) << results.text();
        seconds.push_back(results[rank].value("caught_at") - results[1].value("left_at"));
      }
    }
    SCOPED_TRACE(backend);
    expect_promise(seconds, 1);
  }
}

// args: backend, where. Rank 1 waits for rank 0, rank 3 for 1, and rank 2 for 3: who hangs is in one group of three.
RANK_MAIN(waits_for_one_that_hangs) {
  const auto world = mesh::World::from_environment();
  FabricOptions options;
  options.backend = args[0];
  options.deadline = kDeadline;
  if (args[1] == "halves") options.host = std::to_string(world.rank() / 2);
  const auto fabric = Fabric::connect(world, options);
  std::vector<Group*> groups;
  for (const std::vector<int>& pair : {std::vector<int>{0, 1}, {1, 3}, {2, 3}}) {
    if (std::ranges::find(pair, fabric->rank()) != pair.end()) groups.push_back(&fabric->group(pair, Traffic::gather));
  }
  fabric->everyone().barrier();
  const double began = seconds_now();
  if (fabric->rank() != 0) {
    try {
      groups.front()->barrier();
    } catch (const Timeout& timeout) {
      report("seconds", seconds_now() - began);
      report("silent", first_of(timeout.silent));
      report("absent", first_of(timeout.absent));
      report("absent_ranks", static_cast<double>(timeout.absent.size()));
      std::printf("%s\n", timeout.what());
    }
  }
  os::sleep_for(kDeadline * (fabric->rank() == 0 ? 3 : 1));  // whoever ends is another reason to fail
}

TEST(Fault, ARankThatHangsIsNamedByAllThatWaitForIt) {
  std::vector<RankJob> jobs;
  for (const auto& where :
       std::vector<std::vector<std::string>>{{"gloo", "together"}, {"shm", "together"}, {"shm", "halves"}}) {
    jobs.push_back({.main = "waits_for_one_that_hangs", .ranks = 4, .args = where});
  }
  for (const auto& results : run_side_by_side(jobs)) {
    ASSERT_TRUE(results.all_succeeded()) << results.text();
    for (int rank = 1; rank < 4; ++rank) {
      EXPECT_EQ(results[rank].value("absent"), 0) << results.text();
      EXPECT_EQ(results[rank].value("absent_ranks"), 1) << results.text();
      EXPECT_EQ(results[rank].value("silent"), -1) << results.text();
      EXPECT_GT(results[rank].value("seconds"), 0.97 * static_cast<double>(kDeadline.count())) << results.text();
    }
  }
}

// Each rank goes on in a process namespace of its own, as in a container, where its process has another id.
RANK_MAIN(in_a_container_of_its_own) {
  if (::unshare(CLONE_NEWPID) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) {
    std::printf("not permitted\n");
    return;
  }
  const pid_t inside = ::fork();
  if (inside != 0) {
    int status = 0;
    ::waitpid(inside, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return;
  }
  bool well = true;
  try {
    FabricOptions options;
    options.backend = "shm";
    const auto fabric = Fabric::connect(mesh::World::from_environment(), options);
    for (int i = 0; i < 20; ++i) {
      const auto sum = at::ones({1000});
      fabric->everyone().all_reduce(sum);
      well = well && sum[999].item<float>() == 2;
      os::sleep_for(std::chrono::milliseconds(100));
    }
    report("hosts", fabric->world().hosts());
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    well = false;
  }
  std::fflush(stdout);
  ::_exit(well ? 0 : 1);
}

TEST(Fault, ContainersOfOneHostAndNameAreNotTakenForDead) {
  const auto results = run_ranks("in_a_container_of_its_own", 2);
  if (results.text().find("not permitted") != std::string::npos) GTEST_SKIP() << "this user may not make namespaces";
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  EXPECT_EQ(results[0].value("hosts"), 2);
}

// args: backend. The child of each rank uses the fabric, lets go of it, and ends with all that the end of a process
// does.
RANK_MAIN(forks_after_it_met_the_others) {
  FabricOptions options;
  options.backend = args[0];
  auto fabric = Fabric::connect(mesh::World::from_environment(), options);
  Lane* const lane = &fabric->lane(Traffic::gather);
  const auto sum = at::ones({1000});
  fabric->everyone().all_reduce(sum);
  lane->submit([] {}).wait();
  const pid_t child = ::fork();
  if (child == 0) {
    EXPECT_THROW(fabric->everyone().all_reduce(sum), ForkedChild);
    EXPECT_THROW(fabric->group({0, 1}, Traffic::reduce), ForkedChild);
    EXPECT_THROW(lane->submit([] {}), ForkedChild);
    lane->drain();
    fabric->leave();
    fabric.reset();
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  const os::Deadline deadline(std::chrono::seconds(60));
  while (::waitpid(child, &status, WNOHANG) == 0 && !deadline.passed()) os::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(status, 0) << "the child has not ended well";
  os::sleep_for(std::chrono::milliseconds(1500));  // so long that a goodbye of the child would be heard
  for (int i = 0; i < 5; ++i) fabric->everyone().all_reduce(sum);
  EXPECT_EQ(sum[0].item<float>(), 64);
}

TEST(Fault, AForkedChildHarmsNobody) {
  for (const std::string backend : {"gloo", "shm"}) {
    const auto results = run_ranks("forks_after_it_met_the_others", 2, {backend});
    EXPECT_TRUE(results.all_succeeded()) << results.text();
  }
}

}  // namespace tesserae::comm
