// launch_ranks N COMMAND...: run_local_job as a program, so that a test can interrupt and kill it. REPLACEMENTS: how
// often it replaces lost ranks. SPARES, SPARE_PAUSE (in ms): processes that wait to do so. HOSTS, HOST, ADDRESS, PORT:
// it is one of several hosts; MIN_RANKS, PATIENCE (in ms): with which losses it goes on, and when a host counts as
// lost; SHARED: a folder through which another host takes over. EARLY_EXIT_CODE, STOP_GRACE (in ms): a status that is
// no failure, and how long ranks may take to end. PROGRAMS: ranks are started as programs; else the first ones are
// copies of this process, which become that command, or, if that is "threads", say with how many they would compute,
// or, if it is "fail", tell the launcher that an operation failed, in each epoch before that of number FAILURES; with
// LOSS the last one is lost first. If it is "shrink", rank 0 asks for one rank, and the others hang then. FORK_SERVER:
// what a Python does that is to make ranks by copying itself.
#include <ATen/Parallel.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/comm/membership.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/mesh/world.h"

namespace {

int number(const char* variable, int otherwise) {
  const char* const value = std::getenv(variable);
  return value != nullptr ? std::atoi(value) : otherwise;
}

int fail() {
  tesserae::comm::Membership membership(tesserae::mesh::World::from_environment().launch(), true);
  if (std::getenv("LOSS") != nullptr && membership.rank() == membership.ranks() - 1) std::raise(SIGKILL);
  for (int failures = number("FAILURES", 0); membership.epoch() < failures;) {
    if (!membership.next_epoch({}, std::chrono::minutes(2))) return 3;
  }
  std::printf("epoch %d%s\n", membership.epoch(), membership.is_of_those_left() ? ", of those left" : "");
  return 0;
}

int shrink() {
  tesserae::comm::Membership membership(tesserae::mesh::World::from_environment().launch(), true);
  if (membership.rank() == 0) membership.ask_for_ranks(1);
  if (!membership.wait_for_epoch(std::chrono::minutes(2))) return 3;
  if (!membership.has_place()) std::raise(SIGSTOP);
  return 0;
}

int become(char** command) {
  if (std::string_view(command[0]) == "shrink") return shrink();
  if (std::string_view(command[0]) == "fail") return fail();
  if (std::string_view(command[0]) != "threads") return ::execvp(command[0], command);
  std::printf("%d\n", at::get_num_threads());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::function<int()> body;
  const char* const address = std::getenv("ADDRESS");
  const char* const shared = std::getenv("SHARED");
  std::vector<std::string> server;
  if (const char* const text = std::getenv("FORK_SERVER")) server = {"python3", "-c", text};
  if (std::getenv("PROGRAMS") == nullptr) body = [command = argv + 2] { return become(command); };
  return tesserae::launch::run_local_job({.ranks = std::atoi(argv[1]),
                                          .hosts = number("HOSTS", 1),
                                          .host = number("HOST", 0),
                                          .address = address != nullptr ? address : "first-host",
                                          .port = static_cast<uint16_t>(number("PORT", 0)),
                                          .command = {argv + 2, argv + argc},
                                          .body = body,
                                          .fork_server = server,
                                          .environment = {{"FROM_JOB", "yes"}},
                                          .stop_grace = std::chrono::milliseconds(number("STOP_GRACE", 20'000)),
                                          .early_exit_code = number("EARLY_EXIT_CODE", 0),
                                          .replacements = number("REPLACEMENTS", 0),
                                          .spares = number("SPARES", 0),
                                          .spare_pause = std::chrono::milliseconds(number("SPARE_PAUSE", 10'000)),
                                          .min_ranks = number("MIN_RANKS", 0),
                                          .succession = shared != nullptr ? shared : "",
                                          .host_patience = std::chrono::milliseconds(number("PATIENCE", 300'000))});
}
