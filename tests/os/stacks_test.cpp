#include "tesserae/os/stacks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <latch>
#include <mutex>
#include <thread>

#include "tesserae/base/error.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/futex.h"

namespace tesserae::os {

// Named, so that their frames are found by name.
[[gnu::noinline]] void turns_for_ever(const std::atomic<bool>& stop, std::atomic<uint64_t>& turns) {
  while (!stop) turns.fetch_add(1, std::memory_order_relaxed);
}
[[gnu::noinline]] void goes_down(int levels, std::latch& down, std::latch& up) {
  if (levels > 0) {
    goes_down(levels - 1, down, up);
    asm volatile("");  // no tail call
    return;
  }
  down.count_down();
  up.wait();
}
[[gnu::noinline]] void waits_by_name(const std::latch& go) {
  go.wait();
  asm volatile("");
}
[[gnu::noinline]] void locks_by_name(std::mutex& mutex) {
  const std::scoped_lock lock(mutex);
}

namespace {

using namespace std::chrono_literals;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr auto patient = 60s;

ThreadStack stack_of(pid_t thread, std::chrono::milliseconds patience = patient) {
  for (ThreadStack& stack : thread_stacks(patience)) {
    if (stack.id == thread) return stack;
  }
  return {.id = 0, .name = {}, .state = {}, .frames = {}, .note = "not among them"};
}

/// A thread that runs `body`, and its id.
struct Body {
  template <class Run>
  explicit Body(Run run)
      : thread([this, run] {
          id = ::gettid();
          known.count_down();
          run();
        }) {
    known.wait();
  }
  std::latch known{1};
  std::atomic<pid_t> id{0};
  std::jthread thread;
};

/// Until the thread sleeps.
ThreadStack stack_of_sleeping(const Body& body) {
  for (const Deadline end(patient); !end.passed(); sleep_for(1ms)) {
    ThreadStack stack = stack_of(body.id);
    if (stack.state.starts_with("sleeping")) return stack;
  }
  return stack_of(body.id);
}

TEST(Stacks, OneThatWaitsForAMutex) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  const Body waits([&] { locks_by_name(mutex); });
  const ThreadStack stack = stack_of_sleeping(waits);
  lock.unlock();
  EXPECT_THAT(stack.state, StartsWith("sleeping"));
  EXPECT_THAT(stack.frames, Contains(HasSubstr("lock")));
  EXPECT_THAT(stack.frames, Contains(HasSubstr("locks_by_name"))) << to_text({stack});
  EXPECT_EQ(stack.note, "");
}

TEST(Stacks, OneThatWaitsForAFutex) {
  std::atomic<uint32_t> word{0};
  const Body waits([&] {
    while (word == 0) wait_on(word, 0, 1h);
  });
  for (int i = 0; i < 3; ++i) EXPECT_THAT(stack_of_sleeping(waits).frames, Contains(HasSubstr("wait_on")));
  word = 1;
  wake_all(word);
}

TEST(Stacks, OneThatWaitsForACondition) {
  std::mutex mutex;
  std::condition_variable changed;
  bool go = false;
  const Body waits([&] {
    ::pthread_setname_np(::pthread_self(), "waits");
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return go; });
  });
  const ThreadStack stack = stack_of_sleeping(waits);
  EXPECT_EQ(stack.name, "waits");
  EXPECT_THAT(stack.frames, Contains(HasSubstr("pthread_cond_wait")));
  {
    const std::scoped_lock lock(mutex);
    go = true;
  }
  changed.notify_one();
}

TEST(Stacks, OneThatIsBusyGoesOn) {
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> turns{0};
  const Body busy([&] { turns_for_ever(stop, turns); });
  const ThreadStack stack = stack_of(busy.id);
  EXPECT_THAT(stack.frames, Contains(StartsWith("tesserae::os::turns_for_ever(")));
  const uint64_t seen = turns;
  for (const Deadline end(patient); turns == seen && !end.passed();) sleep_for(1ms);
  EXPECT_GT(turns, seen);
  stop = true;
}

TEST(Stacks, TheOneThatAsksIsAmongThem) {
  const ThreadStack stack = stack_of(::gettid());
  EXPECT_EQ(stack.state, "running");
  EXPECT_THAT(stack.frames, Contains(HasSubstr("thread_stacks")));
  EXPECT_THAT(stack.frames, Contains(StartsWith("main (")));
}

TEST(Stacks, OneThatBlocksTheSignalIsNamedWithoutFrames) {
  std::latch go(1);
  const Body deaf([&] {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
    go.wait();
  });
  const TimePoint begin = now();
  ThreadStack stack = stack_of_sleeping(deaf);
  EXPECT_LT(now() - begin, patient) << "nobody waits for it";
  EXPECT_THAT(stack.note, HasSubstr("blocks signal"));
  EXPECT_THAT(stack.frames, IsEmpty());
  EXPECT_THAT(to_text({stack}), HasSubstr("no frames: it blocks signal"));
  go.count_down();
}

/// A thread whose vforked child still runs sleeps where no signal reaches it, as in a disk that hangs.
TEST(Stacks, AnAnswerThatComesTooLateHarmsNobody) {
  std::atomic<bool> end_child{false};
  std::latch go(1);
  const Body late([&] {
    const pid_t child = ::vfork();
    if (child == 0) {
      while (!end_child) ::usleep(1000);
      ::_exit(0);
    }
    ::waitpid(child, nullptr, 0);
    waits_by_name(go);
  });
  for (const Deadline end(patient); !stack_of(late.id, 20ms).note.starts_with("it has not") && !end.passed();) {
  }
  const ThreadStack stack = stack_of(late.id, 20ms);
  EXPECT_THAT(stack.state, StartsWith("sleeping uninterruptibly"));
  EXPECT_THAT(stack.note, HasSubstr("has not answered an earlier question"));
  EXPECT_THAT(stack.frames, IsEmpty());
  end_child = true;
  for (const Deadline end(patient); stack_of(late.id).frames.empty() && !end.passed();) {
  }
  const ThreadStack after = stack_of_sleeping(late);
  EXPECT_THAT(after.frames, Contains(HasSubstr("waits_by_name"))) << to_text({after});
  go.count_down();
}

TEST(Stacks, ADeepStackIsCut) {
  std::latch down(1), up(1);
  const Body deep([&] { goes_down(1000, down, up); });
  down.wait();
  EXPECT_THAT(stack_of(deep.id).frames, SizeIs(128));
  up.count_down();
}

TEST(Stacks, ManyThreadsThatComeAndGo) {
  std::latch go(1);
  std::vector<std::unique_ptr<Body>> stay;
  for (int i = 0; i < 64; ++i) stay.push_back(std::make_unique<Body>([&] { waits_by_name(go); }));
  std::atomic<bool> stop{false};
  std::atomic<int> came{0};
  std::vector<std::jthread> makers;
  for (int i = 0; i < 2; ++i) {
    makers.emplace_back([&] {
      while (!stop) {
        std::jthread([&] { ++came; }).join();
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    const auto stacks = thread_stacks(patient);
    for (const auto& body : stay) {
      const auto stack = std::ranges::find(stacks, body->id.load(), &ThreadStack::id);
      if (stack == stacks.end()) {
        ADD_FAILURE() << "one is missing";
        continue;
      }
      EXPECT_EQ(stack->note, "");
      EXPECT_THAT(stack->frames, Contains(HasSubstr("waits_by_name")));
    }
  }
  EXPECT_GT(came, 0);
  stop = true;
  go.count_down();
}

TEST(Stacks, SeveralMayAskAtOnce) {
  std::atomic<int> failures{0};
  std::vector<std::jthread> askers;
  for (int i = 0; i < 8; ++i) {
    askers.emplace_back([&] {
      for (int again = 0; again < 20; ++again) {
        if (!stack_of(::gettid()).note.empty()) ++failures;
      }
    });
  }
  askers.clear();
  EXPECT_EQ(failures, 0);
}

TEST(Stacks, SystemCallsGoOn) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  std::atomic<ssize_t> count{-2};
  std::atomic<int> error{0};
  Body reads([&] {
    errno = ERANGE;
    char byte = 0;
    count = ::read(ends[0], &byte, 1);
    error = errno;
  });
  for (int i = 0; i < 20; ++i) EXPECT_THAT(stack_of_sleeping(reads).frames, Contains(HasSubstr("read")));
  ASSERT_EQ(::write(ends[1], "x", 1), 1);
  reads.thread.join();
  EXPECT_EQ(count, 1);
  EXPECT_EQ(error, ERANGE) << "errno is the thread's own";
  for (const int end : ends) ::close(end);
}

TEST(Stacks, AnotherSignalIsTakenIfOursWasTakenAway) {
  thread_stacks();
  int ours = SIGRTMAX;
  struct sigaction now {
  }, other{};
  const auto handled = [&](int number) { return ::sigaction(number, nullptr, &now) == 0 && now.sa_handler != SIG_DFL; };
  while (ours > SIGRTMIN && !handled(ours)) --ours;
  ::sigaction(ours, nullptr, &now);
  other.sa_handler = SIG_IGN;
  const struct sigaction before = now;
  ::sigaction(ours, &other, nullptr);
  std::latch go(1);
  const Body waits([&] { go.wait(); });
  EXPECT_EQ(stack_of(waits.id).note, "");
  ::sigaction(ours, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_IGN) << "it is left alone";
  ::sigaction(ours, &before, nullptr);
  go.count_down();
}

TEST(Stacks, RefusesIfAllSignalsAreTaken) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (int number = SIGRTMIN; number <= SIGRTMAX; ++number) ::signal(number, SIG_IGN);
    try {
      thread_stacks();
    } catch (const IoError&) {
      ::_exit(0);
    }
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Stacks, AForkedChildHasItsOwn) {
  thread_stacks();
  std::atomic<bool> stop{false};
  std::latch go(1);
  const Body stays_behind([&] { go.wait(); });
#ifdef __SANITIZE_ADDRESS__
  stop = true;  // what its allocator holds when a process forks, the child holds for ever
#endif
  const Body asks([&] {
    while (!stop) thread_stacks(patient);
  });
  for (int i = 0; i < 20; ++i) {  // sometimes while the other thread asks, and holds what there is to hold
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(60);
      std::latch end(1);
      const auto own = new Body([&] { end.wait(); });
      const auto stacks = thread_stacks(patient);
      const auto all = [](const ThreadStack& stack) { return !stack.frames.empty(); };
      const bool right = stacks.size() == 2 && std::ranges::all_of(stacks, all) &&
                         (stacks[0].id == own->id || stacks[1].id == own->id);
      ::_exit(right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  go.count_down();
}

TEST(Stacks, ReadLikeThis) {
  const std::vector<ThreadStack> stacks = {
      {.id = 7, .name = "main", .state = "running", .frames = {"f() (libx.so)", "main (p)"}, .note = {}},
      {.id = 9, .name = "lane", .state = "sleeping in futex_do_wait", .frames = {}, .note = "it is deaf"},
      {.id = 10, .name = "pool", .state = "sleeping", .frames = {"f() (libx.so)", "main (p)"}, .note = {}}};
  EXPECT_EQ(to_text(stacks),
            "thread 7 \"main\", running\nthread 10 \"pool\", sleeping\n   #0 f() (libx.so)\n   #1 main (p)\n\n"
            "thread 9 \"lane\", sleeping in futex_do_wait\n  no frames: it is deaf\n");
}

}  // namespace
}  // namespace tesserae::os
