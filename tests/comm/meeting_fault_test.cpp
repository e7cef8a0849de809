// Ranks that are killed, stopped or hang while the ranks meet or make a group, with real processes.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <atomic>
#include <csignal>
#include <string>
#include <thread>

#include "tesserae/base/error.h"
#include "tesserae/comm/fabric.h"
#include "tests/comm/fault.h"
#include "tests/support/promise.h"
#include "tests/support/ranks.h"

namespace {
std::atomic<bool> name_server_is_slow{false};
}

// In place of libc's, also for torch: a name server that is down costs twice 5 s.
extern "C" int getnameinfo(const sockaddr* address, socklen_t length, char* host, socklen_t host_length, char* service,
                           socklen_t service_length, int flags) {
  if (name_server_is_slow) tesserae::os::sleep_for(std::chrono::seconds(10));
  static const auto of_libc = reinterpret_cast<decltype(&getnameinfo)>(dlsym(RTLD_NEXT, "getnameinfo"));
  return of_libc(address, length, host, host_length, service, service_length, flags);
}

namespace tesserae::comm {

using tesserae::testing::RankJob;
using tesserae::testing::report;
using tesserae::testing::run_ranks;
using tesserae::testing::run_side_by_side;

// args: backend; how a rank ends while the others make a group with it: "killed" or "left"; which one.
RANK_MAIN(ends_while_a_group_is_made) {
  FabricOptions options;
  options.backend = args[0];
  const auto fabric = Fabric::connect(mesh::World::from_environment(), options);
  fabric->everyone().barrier();
  if (fabric->rank() == std::stoi(args[2])) {
    report("ended_at", seconds_now());
    if (args[1] == "killed") std::raise(SIGKILL);
    throw std::runtime_error("out of memory");
  }
  try {
    fabric->group(fabric->everyone().members(), Traffic::reduce);
  } catch (const PeerLost& lost) {
    report("caught_at", seconds_now());
    report("lost", first_of(lost.ranks));
    std::printf("%s\n", lost.what());
  }
}

// Groups are made at the start and when the dial turns: nobody waits there for the 60 s of connect_deadline.
TEST(Fault, ARankThatEndsWhileAGroupIsMadeIsNamed) {
  for (const std::string backend : {"gloo", "shm"}) {
    std::vector<double> seconds;
    // Rank 0 serves the store through which the group is made.
    for (const auto& [how, victim] : std::vector<std::pair<std::string, int>>{
             {"killed", 1}, {"left", 1}, {"killed", 0}, {"killed", 2}, {"killed", 0}}) {
      const auto results = run_ranks("ends_while_a_group_is_made", 3, {backend, how, std::to_string(victim)});
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == victim) continue;
        ASSERT_TRUE(results[rank].exit.success()) << results.text();
        ASSERT_NE(results[rank].output.find("lost="), std::string::npos) << results.text();
        EXPECT_EQ(results[rank].value("lost"), victim) << results.text();
        seconds.push_back(results[rank].value("caught_at") - results[victim].value("ended_at"));
      }
    }
    expect_promise(seconds, 1);
  }
}

// args: backend, victim, after how many milliseconds of connecting it is killed or stopped, and which of them.
RANK_MAIN(ends_while_ranks_meet) {
  const auto world = mesh::World::from_environment();
  FabricOptions options;
  options.backend = args[0];
  options.connect_deadline = options.deadline = kDeadline;
  if (world.rank() == std::stoi(args[1])) {
    std::thread([after = std::stoi(args[2]), stopped = args[3] == "stopped"] {
      os::sleep_for(std::chrono::milliseconds(after));
      std::raise(stopped ? SIGSTOP : SIGKILL);
    }).detach();
  }
  const double began = seconds_now();
  try {
    const auto fabric = Fabric::connect(world, options);
    for (;;) fabric->everyone().barrier();
  } catch (const PeerLost& lost) {
    report("named", first_of(lost.ranks));
    std::printf("%s\n", lost.what());
  } catch (const Timeout& timeout) {
    report("named", first_of(timeout.silent));
    std::printf("%s\n", timeout.what());
  }
  report("seconds", seconds_now() - began);
}

// Three ranks that meet, of which rank 1 or rank 0 suffers `fate`: once for each time that has passed until then.
void expect_named(const std::string& backend, const std::vector<int>& milliseconds, const std::string& fate) {
  std::vector<RankJob> jobs;
  std::vector<int> victims;
  for (const int victim : {1, 0}) {
    for (const int after : milliseconds) {
      RankJob job;
      job.main = "ends_while_ranks_meet";
      job.ranks = 3;
      job.args = {backend, std::to_string(victim), std::to_string(after), fate};
      if (fate == "stopped") job.left_behind = {victim};
      jobs.push_back(job);
      victims.push_back(victim);
    }
  }
  const auto ends = run_side_by_side(jobs);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const int victim = victims[i];
    SCOPED_TRACE(cat(backend, ", rank ", victim, " ", fate, " after ", jobs[i].args[2], " ms"));
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      ASSERT_TRUE(ends[i][rank].exit.success()) << ends[i].text();
      EXPECT_EQ(ends[i][rank].value("named"), victim) << ends[i].text();
      EXPECT_LT(ends[i][rank].value("seconds"), static_cast<double>(10 * kDeadline.count())) << ends[i].text();
    }
  }
}

// Whenever it happens: who has not come yet is named at the deadline, who has come within a second.
TEST(Fault, ARankThatIsKilledWhileTheRanksMeetIsNamed) {
  for (const std::string backend : {"gloo", "shm"}) expect_named(backend, {0, 2, 4, 8, 16, 64}, "killed");
}

// One that serves the store for the others answers them nothing from then on.
TEST(Fault, ARankThatIsStoppedWhileTheRanksMeetIsNamed) {
  expect_named("shm", {0, 4, 16}, "stopped");
}

// args: none. Rank 1 never comes, and no name server answers once the others wait for it.
RANK_MAIN(waits_without_a_name_server) {
  const auto world = mesh::World::from_environment();
  if (world.rank() == 1) return;
  FabricOptions options;
  options.connect_deadline = kDeadline;
  std::thread([] {
    os::sleep_for(kDeadline / 2);
    name_server_is_slow = true;
  }).detach();
  try {
    Fabric::connect(world, options);
  } catch (const Timeout& timeout) {
    report("named", first_of(timeout.silent));
    std::printf("%s\n", timeout.what());
  }
}

TEST(Fault, ARankThatDoesNotComeIsNamedWithoutANameServer) {
  const auto ends = run_ranks("waits_without_a_name_server", 3);
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(ends[rank].exit.success()) << ends.text();
    EXPECT_EQ(ends[rank].value("named"), 1) << ends.text();
  }
}

// args: backend; how a rank is missing while the others make a group with it: "stopped" or "hangs".
RANK_MAIN(is_missing_while_a_group_is_made) {
  FabricOptions options;
  options.backend = args[0];
  options.connect_deadline = kDeadline;
  const auto fabric = Fabric::connect(mesh::World::from_environment(), options);
  fabric->everyone().barrier();
  if (fabric->rank() == 1) {
    if (args[1] == "stopped") std::raise(SIGSTOP);
    return os::sleep_for(3 * kDeadline);
  }
  try {
    fabric->group(fabric->everyone().members(), Traffic::reduce);
  } catch (const Timeout& timeout) {
    report("silent", first_of(timeout.silent));
    report("absent", first_of(timeout.absent));
    std::printf("%s\n", timeout.what());
  }
  os::sleep_for(kDeadline);
}

TEST(Fault, ARankThatIsMissingWhileAGroupIsMadeIsNamed) {
  std::vector<RankJob> jobs;
  for (const std::string backend : {"gloo", "shm"}) {
    for (const std::string how : {"stopped", "hangs"}) {
      jobs.push_back({.main = "is_missing_while_a_group_is_made", .ranks = 4, .args = {backend, how}});
      if (how == "stopped") jobs.back().left_behind = {1};
    }
  }
  const auto ends = run_side_by_side(jobs);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const bool stopped = jobs[i].args[1] == "stopped";
    for (const int rank : {0, 2, 3}) {
      ASSERT_TRUE(ends[i][rank].exit.success()) << ends[i].text();
      EXPECT_EQ(ends[i][rank].value("silent"), stopped ? 1 : -1) << ends[i].text();
      EXPECT_EQ(ends[i][rank].value("absent"), stopped ? -1 : 1) << ends[i].text();
    }
  }
}

}  // namespace tesserae::comm
