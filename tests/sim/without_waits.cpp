// The program of the tests in this folder. With --without-waits it runs them once for each line of the engine that
// waits, without that wait ([Note: negative controls] in waits.h), until one of them fails:
//
//  1. Each test runs in a process of its own, with one seed, and says which waits it meets.
//  2. For each of these: the tests that meet it run without it, the quickest first, with a few seeds, then with 20. A
//     number that differs, a crash or a deadlock is a find.
//
// Processes are forked before anybody has a thread or a device, so all have the same addresses. Ends with 1 if a wait
// is not found, or if one is written in a source that no test meets.
//
//   --only=TEXT   waits whose name has it        --every   go on after the first find, and say how many tests find it
//   --verbose     what the tests that ran without a wait have printed

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/base/error.h"
#include "tests/sim/fixture.h"
#include "tests/sim/wait_sites.h"

namespace tesserae::sim {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int few_seeds = 3;
constexpr int many_seeds = 20;
constexpr int at_once = 2;
constexpr unsigned longest_seconds = 240;  // ten times what the slowest test takes with all seeds
constexpr int exit_found = 3;

struct Arguments {
  bool every = false, verbose = false;
  std::string only;
};
Arguments arguments;

/// A test, and what is known of it.
struct Tested {
  std::string name;
  double seconds = 0;
  std::vector<WaitCall> calls;
};

/// A child that runs one test, and what it has to say.
struct Child {
  pid_t process = -1;
  std::FILE* words = nullptr;
  Clock::time_point begin;
  std::function<void(int status, std::FILE* words, double seconds)> then;
};

class FirstFailure final : public ::testing::EmptyTestEventListener {
 public:
  explicit FirstFailure(std::FILE* words) : words_(words) {}
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::string text = result.summary();
    std::ranges::replace(text, '\n', ' ');
    std::fprintf(words_, "%s", text.c_str());
    std::fflush(words_);
    _exit(exit_found);
  }

 private:
  std::FILE* words_;
};

/// Up to `at_once` children.
class Children {
 public:
  void run(const std::string& test, int seeds, const std::function<void()>& prepare,
           const std::function<void(std::FILE* words)>& end,
           std::function<void(int status, std::FILE* words, double seconds)> then) {
    while (children_.size() >= at_once) wait();
    Child child{.words = std::tmpfile(), .begin = Clock::now(), .then = std::move(then)};
    std::cout.flush();
    child.process = fork();
    if (child.process < 0 || child.words == nullptr) throw Error("without_waits", cat("fork: ", std::strerror(errno)));
    if (child.process == 0) {
      alarm(longest_seconds);
      if (!arguments.verbose && !(std::freopen("/dev/null", "w", stdout) && std::freopen("/dev/null", "w", stderr))) {
        _exit(1);
      }
      asked_seeds = seeds;
      ::testing::GTEST_FLAG(filter) = test;
      ::testing::UnitTest::GetInstance()->listeners().Append(new FirstFailure(child.words));
      prepare();
      const int status = RUN_ALL_TESTS();
      end(child.words);
      std::fflush(child.words);
      _exit(status);  // no destructors: what a wait was left out of may still run
    }
    children_.push_back(std::move(child));
  }
  void wait() {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    const auto at = std::ranges::find(children_, ended, &Child::process);
    if (at == children_.end()) return;
    Child child = std::move(*at);
    children_.erase(at);
    std::rewind(child.words);
    child.then(status, child.words, std::chrono::duration<double>(Clock::now() - child.begin).count());
    std::fclose(child.words);
  }
  void wait_for_all() {
    while (!children_.empty()) wait();
  }

 private:
  std::deque<Child> children_;
};

std::vector<Tested> all_tests() {
  std::vector<Tested> tests;
  const auto& program = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const auto& suite = *program.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      tests.push_back({.name = cat(suite.name(), ".", suite.GetTestInfo(j)->name()), .calls = {}});
    }
  }
  return tests;
}

void write_calls(std::FILE* words) {
  for (const WaitCall& call : watched_waits()) {
    std::fprintf(words, "%d %zu", static_cast<int>(call.wait), call.stack.size());
    for (void* const address : call.stack) std::fprintf(words, " %p", address);
    std::fputc('\n', words);
  }
}

std::vector<WaitCall> read_calls(std::FILE* words) {
  std::vector<WaitCall> calls;
  int wait = 0;
  size_t depth = 0;
  while (std::fscanf(words, "%d %zu", &wait, &depth) == 2) {
    WaitCall call{static_cast<Wait>(wait), std::vector<void*>(depth)};
    for (void*& address : call.stack) {
      if (std::fscanf(words, "%p", &address) != 1) return calls;
    }
    calls.push_back(std::move(call));
  }
  return calls;
}

std::vector<Tested> watch_all(Children& children) {
  std::vector<Tested> tests = all_tests();
  for (Tested& test : tests) {
    children.run(test.name, 1, watch_waits, write_calls, [&test](int status, std::FILE* words, double seconds) {
      test.seconds = seconds;
      if (status != 0) throw Error("without_waits", cat(test.name, " fails with all waits in place"));
      test.calls = read_calls(words);
    });
  }
  children.wait_for_all();
  std::ranges::sort(tests, {}, &Tested::seconds);
  return tests;
}

bool meets(const Tested& test, const WaitSite& site) {
  return std::ranges::any_of(test.calls, [&](const WaitCall& call) {
    return call.wait == site.wait && std::ranges::any_of(call.stack, [&](void* address) {
             return std::ranges::find(site.at, address) != site.at.end();
           });
  });
}

struct Outcome {
  int met = 0, found = 0, seeds = 0;
  std::string how;
};

std::string how_it_ended(int status, std::FILE* words) {
  if (WIFSIGNALED(status)) {
    return WTERMSIG(status) == SIGALRM ? "it never ends" : cat("it crashes: ", strsignal(WTERMSIG(status)));
  }
  char text[160] = "";
  const size_t count = std::fread(text, 1, sizeof text - 1, words);
  return std::string(text, count);
}

Outcome search(const WaitSite& site, const std::vector<Tested>& tests, Children& children) {
  Outcome outcome;
  for (const Tested& test : tests) outcome.met += meets(test, site) ? 1 : 0;
  for (const int seeds : {few_seeds, many_seeds}) {
    if (outcome.found > 0) break;
    outcome.seeds = seeds;
    for (const Tested& test : tests) {
      if (outcome.found > 0 && !arguments.every) break;
      if (!meets(test, site)) continue;
      children.run(
          test.name, seeds, [&site] { leave_out(site.wait, site.through, site.at); }, [](std::FILE*) {},
          [&outcome, &test](int status, std::FILE* words, double) {
            if (status == 0) return;
            if (outcome.found++ == 0) outcome.how = cat(test.name, ": ", how_it_ended(status, words));
          });
    }
    children.wait_for_all();
  }
  return outcome;
}

int run() {
  Children children;
  const auto begin = Clock::now();
  const std::vector<Tested> tests = watch_all(children);
  std::vector<WaitCall> calls;
  for (const Tested& test : tests) calls.insert(calls.end(), test.calls.begin(), test.calls.end());
  const std::vector<WaitSite> sites = wait_sites(calls);
  int tried = 0, found = 0;
  for (const WaitSite& site : sites) {
    if (site.name().find(arguments.only) == std::string::npos) continue;
    const Outcome outcome = search(site, tests, children);
    ++tried;
    found += outcome.found > 0 ? 1 : 0;
    std::cout << (outcome.found > 0 ? "found      " : "NOT FOUND  ") << site.name();
    if (arguments.every) std::cout << ", by " << outcome.found << " of " << outcome.met << " tests";
    std::cout << ", with up to " << outcome.seeds << " seeds  " << outcome.how << std::endl;
  }
  const std::vector<std::string> missed = never_met(sites, TESSERAE_ROOT);
  for (const std::string& line : missed) std::cout << "NEVER MET  " << line << "\n";
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  std::cout << found << " of " << tried << " waits are found when they are left out; " << missed.size()
            << " are met by no test; " << static_cast<int>(seconds) << " s" << std::endl;
  return found == tried && missed.empty() ? 0 : 1;
}

}  // namespace
}  // namespace tesserae::sim

int main(int count, char** words) {
  ::testing::InitGoogleTest(&count, words);
  bool without_waits = false;
  for (int i = 1; i < count; ++i) {
    const std::string_view word = words[i];
    constexpr std::string_view only = "--only=";
    if (word == "--without-waits") {
      without_waits = true;
    } else if (word == "--every") {
      tesserae::sim::arguments.every = true;
    } else if (word == "--verbose") {
      tesserae::sim::arguments.verbose = true;
    } else if (word.starts_with(only)) {
      tesserae::sim::arguments.only = word.substr(only.size());
    } else {
      std::cerr << "unknown: " << word << "\n";
      return 2;
    }
  }
  return without_waits ? tesserae::sim::run() : RUN_ALL_TESTS();
}
