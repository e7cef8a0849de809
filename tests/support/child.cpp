#include "tests/support/child.h"

#include <sys/prctl.h>
#include <sys/single_threaded.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace tesserae::testing {

namespace {

// In the child, before anything else.
void settle(pid_t parent, const Child::Environment& environment, int output) {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != parent) ::_exit(127);
  if (::dup2(output, STDOUT_FILENO) < 0 || ::dup2(output, STDERR_FILENO) < 0) ::_exit(127);
  // Also those of other ranks, whose output ends only when nobody can write any more.
  if (::close_range(STDERR_FILENO + 1, ~0U, 0) != 0) ::_exit(127);
  for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
}

pid_t fork_or_throw() {
  std::fflush(nullptr);  // or the child would write it, too
  const pid_t id = ::fork();
  if (id < 0) throw std::runtime_error("cannot fork");
  return id;
}

}  // namespace

Child Child::copy(const Environment& environment, int output, const std::function<int()>& main) {
  const pid_t parent = ::getpid();
  const pid_t id = fork_or_throw();
  if (id == 0) {
    settle(parent, environment, output);
    std::exit(main());
  }
  return Child(id);
}

Child Child::program(const Environment& environment, int output, std::vector<std::string> words) {
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t id = fork_or_throw();
  if (id == 0) {
    settle(parent, environment, output);
    ::execv(pointers[0], pointers.data());
    ::_exit(127);
  }
  return Child(id);
}

Child::Child(Child&& other) noexcept : id_(std::exchange(other.id_, -1)), exit_(other.exit_) {}

Child::~Child() {
  if (id_ < 0 || exit_) return;
  ::kill(id_, SIGKILL);
  ::waitpid(id_, nullptr, 0);
}

std::optional<os::Exit> Child::poll() {
  int status = 0;
  if (exit_ || ::waitpid(id_, &status, WNOHANG) != id_) return exit_;
  exit_ = WIFSIGNALED(status) ? os::Exit{.code = 0, .signal = WTERMSIG(status)}
                              : os::Exit{.code = WEXITSTATUS(status), .signal = 0};
  return exit_;
}

void Child::signal(int number) {
  if (!poll()) ::kill(id_, number);
}

bool may_go_on_as_a_copy() {
  const char* threads = std::getenv("OMP_NUM_THREADS");
  return threads != nullptr && std::string(threads) == "1" && __libc_single_threaded;
}

}  // namespace tesserae::testing
