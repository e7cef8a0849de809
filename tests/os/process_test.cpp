#include "tesserae/os/process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <optional>
#include <thread>

#include "tesserae/base/error.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/process_watch.h"

namespace tesserae::os {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

const Deadline soon() {
  return Deadline(60s);
}

Command shell(const std::string& script) {
  return {.arguments = {"sh", "-c", script}, .die_with_parent = true};
}

/// Everything that the command writes to its output until it closes it.
std::string output_of(Command command) {
  Pipe pipe = make_pipe();
  command.output = pipe.write.get();
  Process child = Process::spawn(command);
  pipe.write.reset();
  std::string all;
  for (std::string part = read_some(pipe.read.get()); !part.empty(); part = read_some(pipe.read.get())) all += part;
  EXPECT_TRUE(child.wait(soon()).has_value());
  return all;
}

/// The same of a copy of this process that does `body`.
std::string output_of_copy(const std::function<int()>& body, int kept = -1) {
  Pipe pipe = make_pipe();
  std::optional<Process> child =
      Process::copy({.die_with_parent = true, .new_group = true, .output = pipe.write.get(), .kept = kept}, body);
  if (!child) return "no copy";
  pipe.write.reset();
  std::string all;
  for (std::string part = read_some(pipe.read.get()); !part.empty(); part = read_some(pipe.read.get())) all += part;
  EXPECT_EQ(child->wait(soon())->code, 5);
  return all;
}

bool exists(pid_t process) {
  return ::kill(process, 0) == 0;
}

TEST(Process, ReportsHowItEnded) {
  Process fine = Process::spawn(shell("exit 0"));
  EXPECT_TRUE(fine.wait(soon())->success());
  Process failed = Process::spawn(shell("exit 7"));
  EXPECT_EQ(failed.wait(soon())->code, 7);
  EXPECT_EQ(failed.poll()->text(), "exited with code 7");
  Process killed = Process::spawn(shell("kill -9 $$"));
  const Exit exit = killed.wait(soon()).value();
  EXPECT_EQ(exit.signal, SIGKILL);
  EXPECT_FALSE(exit.success());
  EXPECT_EQ(exit.text(), "killed by signal 9 (Killed)");
}

TEST(Process, ACopyDoesWhatItIsTold) {
  const std::string known = "what this process knows";
  EXPECT_EQ(output_of_copy([&known] {
              std::printf("%s", known.c_str());
              return 5;
            }),
            known);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// They belong to the process that was copied, and write to pages that both share until then.
TEST(Process, ACopyEndsWithoutExitHandlers) {
  EXPECT_EQ(output_of_copy([] {
              std::atexit([] { std::printf("and more"); });
              std::printf("its own");
              return 5;
            }),
            "its own");
}
#endif

TEST(Process, ACopyHasOfOurDescriptorsWhatAProgramWouldHave) {
  const Pipe ours = make_pipe(), kept = make_pipe();
  const int theirs = ::dup(kept.read.get());  // without CLOEXEC
  const auto there = [](int number) { return ::fcntl(number, F_GETFD) >= 0 ? "yes " : "no "; };
  EXPECT_EQ(output_of_copy(
                [&] {
                  for (const int each : {ours.read.get(), kept.read.get(), theirs}) std::printf("%s", there(each));
                  return 5;
                },
                kept.read.get()),
            "no yes yes ");
  ::close(theirs);
}

TEST(Process, AProcessWithOtherThreadsIsNotCopied) {
  std::promise<void> done;
  std::thread other([&done] { done.get_future().wait(); });
  EXPECT_EQ(output_of_copy([] { return 5; }), "no copy");
  done.set_value();
  other.join();
#ifndef __SANITIZE_THREAD__  // which has a thread of its own from then on
  EXPECT_EQ(output_of_copy([] { return 5; }), "");
#endif
}

TEST(Process, WaitEndsAtTheDeadline) {
  Process child = Process::spawn({.arguments = {"sleep", "1000"}, .die_with_parent = true});
  const TimePoint start = now();
  EXPECT_FALSE(child.wait(Deadline(50ms)).has_value());
  EXPECT_GE(now() - start, 50ms);
  EXPECT_FALSE(child.poll().has_value());
  child.signal(SIGTERM);
  EXPECT_EQ(child.wait(soon())->signal, SIGTERM);
  EXPECT_NO_THROW(child.signal(SIGTERM)) << "one that ended is left alone";
}

TEST(Process, ItsIdIsItsOwnUntilItIsDestroyed) {
  pid_t id = 0;
  {
    Process child = Process::spawn({.arguments = {"sh", "-c", "exit 3"}, .new_group = true});
    id = child.id();
    EXPECT_EQ(child.wait(soon())->code, 3);
    EXPECT_EQ(::kill(-id, 0), 0)
        << "another process could lead a group of that number, which signal_group() would meet";
    EXPECT_NO_THROW(child.signal_group(SIGKILL));
    EXPECT_EQ(child.poll()->code, 3);
  }
  EXPECT_EQ(::kill(id, 0), -1) << "a zombie stays behind";
}

TEST(Process, ThrowsIfTheProgramCannotStart) {
  try {
    Process::spawn({.arguments = {"no-such-program-anywhere"}});
    FAIL() << "it started";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("no-such-program-anywhere"), HasSubstr("No such file or directory")));
  }
  EXPECT_THROW(Process::spawn({.arguments = {"/"}}), IoError);
  EXPECT_THROW(Process::spawn({}), InvalidArgument);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD) << "nothing is left behind";
}

TEST(Process, AddsToTheEnvironment) {
  ::setenv("TESSERAE_TEST_KEPT", "kept", 1);
  ::setenv("TESSERAE_TEST_REPLACED", "old", 1);
  Command command = shell("echo $TESSERAE_TEST_KEPT $TESSERAE_TEST_REPLACED $TESSERAE_TEST_ADDED");
  command.environment = {{"TESSERAE_TEST_REPLACED", "new"}, {"TESSERAE_TEST_ADDED", "a=b c"}};
  EXPECT_EQ(output_of(command), "kept new a=b c\n");
}

TEST(Process, RedirectsBothStreams) {
  Pipe pipe = make_pipe();
  Command command = shell("echo to errors >&2");
  command.errors = pipe.write.get();
  EXPECT_EQ(output_of(command), "");
  EXPECT_EQ(read_some(pipe.read.get()), "to errors\n");
  command = shell("echo a; echo b >&2");
  Pipe both = make_pipe();
  command.output = command.errors = both.write.get();
  Process::spawn(command).wait(soon());
  EXPECT_EQ(read_some(both.read.get()), "a\nb\n");
}

TEST(Process, ChildrenStartWithDefaultSignals) {
  // A launcher that catches or blocks signals must not hand that on.
  sigset_t term, earlier;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &term, &earlier);
  const auto handler = ::signal(SIGINT, SIG_IGN);
  Process terminated = Process::spawn({.arguments = {"sleep", "1000"}, .die_with_parent = true});
  Process interrupted = Process::spawn({.arguments = {"sleep", "1000"}, .die_with_parent = true});
  ::signal(SIGINT, handler);
  ::sigprocmask(SIG_SETMASK, &earlier, nullptr);
  terminated.signal(SIGTERM);
  interrupted.signal(SIGINT);
  EXPECT_EQ(terminated.wait(soon())->signal, SIGTERM);
  EXPECT_EQ(interrupted.wait(soon())->signal, SIGINT);
}

TEST(Process, DestroyingItKillsAndReaps) {
  pid_t first = 0, second = 0;
  {
    Process child = Process::spawn({.arguments = {"sleep", "1000"}});
    first = child.id();
    child = Process::spawn({.arguments = {"sleep", "1000"}});
    EXPECT_FALSE(exists(first)) << "assigned over";
    second = child.id();
    Process moved = std::move(child);
    EXPECT_TRUE(exists(second));
  }
  EXPECT_FALSE(exists(second));
}

TEST(Process, AGroupIsKilledWithItsChildren) {
  Command command = shell("sleep 1000 & echo $!; wait");
  command.new_group = true;
  Pipe pipe = make_pipe();
  command.output = pipe.write.get();
  Process leader = Process::spawn(command);
  pipe.write.reset();
  const ProcessWatch grandchild(std::stoi(read_some(pipe.read.get())));
  EXPECT_FALSE(grandchild.gone());
  EXPECT_EQ(::getpgid(leader.id()), leader.id());
  EXPECT_EQ(::getpgid(grandchild.id()), leader.id());
  leader.signal(SIGKILL);
  EXPECT_EQ(leader.wait(soon())->signal, SIGKILL);
  EXPECT_FALSE(grandchild.gone()) << "it outlives its leader";
  leader.signal_group(SIGKILL);
  EXPECT_TRUE(grandchild.wait_gone(soon()));
}

TEST(Process, AGroupOfItsOwnReadsNoTerminal) {
  const Descriptor terminal(::posix_openpt(O_RDWR | O_NOCTTY));
  ASSERT_TRUE(terminal && ::grantpt(terminal.get()) == 0 && ::unlockpt(terminal.get()) == 0);
  const Descriptor other(::open(::ptsname(terminal.get()), O_RDWR | O_NOCTTY));
  const Descriptor before(::dup(STDIN_FILENO));
  ASSERT_GE(::dup2(other.get(), STDIN_FILENO), 0);
  Command command = shell("read line || exit 7");
  command.new_group = true;
  Process process = Process::spawn(command);
  ::dup2(before.get(), STDIN_FILENO);
  const auto exit = process.wait(soon());
  ASSERT_TRUE(exit.has_value()) << "it waits for what nobody types";
  EXPECT_EQ(exit->code, 7);
}

TEST(Process, DiesWithItsParent) {
  // This process forks a parent, the parent spawns a child and is killed the hard way.
  Pipe pipe = make_pipe();
  const pid_t parent = ::fork();
  ASSERT_GE(parent, 0);
  if (parent == 0) {
    const Process child = Process::spawn({.arguments = {"sleep", "1000"}, .die_with_parent = true});
    const pid_t id = child.id();
    [[maybe_unused]] const ssize_t sent = ::write(pipe.write.get(), &id, sizeof id);
    for (;;) ::pause();
  }
  pipe.write.reset();
  pid_t id = 0;
  ASSERT_EQ(::read(pipe.read.get(), &id, sizeof id), static_cast<ssize_t>(sizeof id));
  const ProcessWatch child(id);
  EXPECT_FALSE(child.gone());
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  EXPECT_TRUE(child.wait_gone(soon()));
}

TEST(Process, StartTimesNameProcesses) {
  const auto own = start_time(process_id());
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(start_time(process_id()), own);
  EXPECT_LE(start_time(parent_id()).value_or(0), *own);
  Process child = Process::spawn({.arguments = {"sleep", "1000"}, .die_with_parent = true});
  EXPECT_GE(start_time(child.id()).value(), *own);
  child.signal(SIGKILL);
  EXPECT_TRUE(ProcessWatch(child.id()).wait_gone(soon()));
  EXPECT_FALSE(start_time(child.id()).has_value()) << "a zombie";
  EXPECT_TRUE(child.poll().has_value());
  EXPECT_FALSE(start_time(child.id()).has_value());
}

TEST(Process, StartTimeReadsNamesWithBracketsAndSpaces) {
  // The name stands in the middle of the line that start_time parses.
  Process child = Process::spawn(shell("printf '%s' 'a) Z 1 (' > /proc/$$/comm; kill -STOP $$"));
  for (const Deadline deadline = soon(); !deadline.passed();) {
    const auto started = start_time(child.id());
    ASSERT_TRUE(started.has_value());
    std::string name = output_of({.arguments = {"cat", "/proc/" + std::to_string(child.id()) + "/comm"}});
    if (name != "a) Z 1 (\n") continue;
    EXPECT_EQ(start_time(child.id()), started);
    EXPECT_LT(*started - start_time(process_id()).value(), 1'000'000u) << "ticks since this process started";
    return;
  }
  FAIL() << "the child did not rename itself";
}

TEST(Process, AdoptsWhatAChildHasLeftBehind) {
  const auto left_behind = [] { return static_cast<pid_t>(std::stoi(output_of(shell("sleep 60 >&- & echo $!")))); };
  const Orphans orphans;
  const pid_t id = left_behind();
  Process mine = Process::adopt(id);
  EXPECT_FALSE(mine.poll().has_value());
  mine.signal(SIGTERM);
  const auto exit = mine.wait(soon());
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->signal, SIGTERM);
}

TEST(Process, KnowsItsAge) {
  const std::chrono::nanoseconds age = process_age();
  EXPECT_GE(age, 0s);
  sleep_for(50ms);
  EXPECT_GE(process_age(), age + 50ms);
  const TimePoint begin = now();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(process_age() < now() - begin + 20ms ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "it is younger";
}

}  // namespace
}  // namespace tesserae::os
