#include "tesserae/os/process.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/failure.h"
#include "tesserae/os/process_watch.h"

extern char** environ;

namespace tesserae::os {
namespace {

/// What libraries have made, and would take apart at their end, is of the process that was copied: to write to it would
/// make pages of this process's own, some 50 MB for torch, at a time when a job may hold most. Sanitizers report there.
[[noreturn]] void end_copy(int status) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::exit(status);
#else
  std::fflush(nullptr);
  _exit(status);
#endif
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& added) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!added.contains(text.substr(0, text.find('=')))) all.push_back(text);
  }
  for (const auto& [name, value] : added) all.push_back(name + "=" + value);
  return all;
}

/// Runs in the child between vfork and exec, in memory that is the parent's: only calls that are safe there, though
/// other threads may have held locks. False, with errno set: it failed.
bool settle(const Command& command, pid_t parent) {
  struct sigaction by_default {};
  by_default.sa_handler = SIG_DFL;
  for (int number = 1; number < NSIG; ++number) {  // a handler would run in the parent's memory
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) != 0) continue;
    if (action.sa_handler != SIG_IGN) sigaction(number, &by_default, nullptr);
  }
  for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGPIPE}) sigaction(number, &by_default, nullptr);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (command.new_group && setpgid(0, 0) != 0) return false;
  // A group in the background that reads its terminal is stopped, without a word: it reads the end instead.
  if (command.new_group && isatty(STDIN_FILENO)) {
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (nothing < 0 || dup2(nothing, STDIN_FILENO) < 0) return false;
    ::close(nothing);
  }
  if (command.die_with_parent) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return false;
    if (getppid() != parent) _exit(127);  // it died before the line above: no signal will come
  }
  // Both are first moved out of the way, in case one of them is the number that the other is to become.
  const int output = command.output < 0 ? -1 : fcntl(command.output, F_DUPFD_CLOEXEC, 3);
  const int errors = command.errors < 0 ? -1 : fcntl(command.errors, F_DUPFD_CLOEXEC, 3);
  return (command.output < 0 || dup2(output, STDOUT_FILENO) >= 0) &&
         (command.errors < 0 || dup2(errors, STDERR_FILENO) >= 0) &&
         (command.kept < 0 || fcntl(command.kept, F_SETFD, 0) == 0);
}

/// Returns only on failure, with errno set.
void become(const Command& command, char* const* arguments, char* const* environment, pid_t parent) {
  if (settle(command, parent)) execvpe(arguments[0], arguments, environment);
}

/// As an exec does it.
void close_ours() {
  std::vector<int> open;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    open.push_back(std::atoi(entry.path().filename().c_str()));
  }
  for (const int number : open) {
    const int flags = fcntl(number, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) != 0) close(number);
  }
}

bool has_other_threads() {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  return std::distance(begin(threads), end(threads)) > 1;
}

/// Starts the child and returns its id, or -1 with errno set. Not by fork: that copies the page tables of a process
/// that may hold hundreds of gigabytes, and has it fault on every page that it writes next (0.7 s for each GiB).
[[gnu::noinline]] pid_t start(const Command& command, char* const* arguments, char* const* environment, int report) {
  const pid_t parent = getpid();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t id = vfork();
  if (id == 0) {
    become(command, arguments, environment, parent);
    const int error = errno;
    [[maybe_unused]] const ssize_t sent = ::write(report, &error, sizeof error);
    _exit(127);
  }
  const int error = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = error;
  return id;
}

Exit exit_of(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) return {.code = info.si_status, .signal = 0};
  return {.code = 0, .signal = info.si_status};
}

}  // namespace

std::string Exit::text() const {
  if (signal == 0) return cat("exited with code ", code);
  const char* name = sigdescr_np(signal);
  return cat("killed by signal ", signal, name == nullptr ? "" : cat(" (", name, ")"));
}

Process Process::spawn(const Command& command) {
  if (command.arguments.empty()) throw InvalidArgument("Process::spawn", "no program is named");
  std::vector<std::string> arguments = command.arguments;
  std::vector<std::string> environment = merged_environment(command.environment);
  const std::vector<char*> argument_pointers = pointers(arguments);
  const std::vector<char*> environment_pointers = pointers(environment);
  Pipe report = make_pipe();  // closed by a successful exec, else carries the child's errno

  const pid_t id = start(command, argument_pointers.data(), environment_pointers.data(), report.write.get());
  if (id < 0) throw failure("Process::spawn", arguments[0], "cannot fork");
  // Also here, so that the group exists when this call returns; the child's own call makes it exist before its exec.
  if (command.new_group) setpgid(id, id);
  Process child(id);
  report.write.reset();
  const std::string sent = read_some(report.read.get(), sizeof(int));
  if (sent.size() == sizeof(int)) {
    int error = 0;
    memcpy(&error, sent.data(), sizeof error);
    throw failure("Process::spawn", arguments[0], "cannot start", error);
  }
  return child;
}

std::optional<Process> Process::copy(const Command& command, const std::function<int()>& body) {
  if (has_other_threads()) return std::nullopt;
  std::fflush(nullptr);  // what is left in the buffers would be written twice
  const pid_t parent = getpid();
  const pid_t id = ::fork();
  if (id < 0) throw failure("Process::copy", "this process", "cannot fork");
  if (id == 0) {
    if (!settle(command, parent)) _exit(127);
    close_ours();
    end_copy(body());
  }
  if (command.new_group) setpgid(id, id);  // so that the group exists when this call returns
  return Process(id);
}

Process::Process(Process&& other) noexcept : id_(std::exchange(other.id_, -1)), exit_(other.exit_) {}

Process& Process::operator=(Process&& other) noexcept {
  if (this != &other) {
    end();
    id_ = std::exchange(other.id_, -1);
    exit_ = other.exit_;
  }
  return *this;
}

Process::~Process() {
  end();
}

void Process::end() noexcept {
  if (id_ < 0) return;
  if (!exit_) ::kill(id_, SIGKILL);
  while (::waitpid(id_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

std::optional<Exit> Process::poll() {
  if (exit_ || id_ < 0) return exit_;
  siginfo_t info{};
  // It stays as a zombie: its id, which a group may have, is nobody else's while this object lives.
  while (::waitid(P_PID, static_cast<id_t>(id_), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    if (errno != EINTR) throw failure("Process::poll", cat("process ", id_), "cannot wait for it");
  }
  if (info.si_pid == id_) exit_ = exit_of(info);
  return exit_;
}

std::optional<Exit> Process::wait(const Deadline& deadline) {
  if (!poll() && id_ >= 0) ProcessWatch(id_).wait_gone(deadline);
  // A process whose first thread has ended is gone, but can only be reaped when its other threads have ended too.
  while (!poll() && id_ >= 0 && !deadline.passed()) sleep_for(std::chrono::milliseconds(1));
  return exit_;
}

void Process::signal(int number) {
  if (poll() || id_ < 0) return;
  if (::kill(id_, number) != 0) throw failure("Process::signal", cat("process ", id_), cat("cannot send ", number));
}

void Process::signal_group(int number) {
  if (id_ < 0) return;
  if (::kill(-id_, number) != 0 && errno != ESRCH) {
    throw failure("Process::signal_group", cat("process group ", id_), cat("cannot send ", number));
  }
}

Orphans::Orphans() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) throw failure("Orphans", "this process", "cannot adopt its descendants");
}

Orphans::~Orphans() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

pid_t process_id() {
  return getpid();
}

void name_process(const std::string& name) {
  ::prctl(PR_SET_NAME, name.c_str());  // it takes as much as fits
}

pid_t parent_id() {
  return getppid();
}

std::optional<uint64_t> start_time(pid_t process) {
  // Read past Files: a test that makes files fail must not make processes look dead.
  const int number = ::open(cat("/proc/", process, "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (number < 0) return std::nullopt;
  const Descriptor descriptor(number);
  char buffer[2048];
  const ssize_t length = ::read(descriptor.get(), buffer, sizeof buffer);
  if (length <= 0) return std::nullopt;
  const std::string_view text(buffer, static_cast<size_t>(length));
  // The second field is the program's name in brackets, and may hold spaces and brackets itself. After it: state, ...
  size_t at = text.rfind(')');
  if (at == std::string_view::npos || at + 2 >= text.size()) return std::nullopt;
  if (text[at + 2] == 'Z' || text[at + 2] == 'X') return std::nullopt;
  for (int field = 2; field < 22 && at != std::string_view::npos; ++field) at = text.find(' ', at + 1);
  if (at == std::string_view::npos) return std::nullopt;
  uint64_t ticks = 0;
  const auto parsed = std::from_chars(text.data() + at + 1, text.data() + text.size(), ticks);
  return parsed.ec == std::errc() ? std::optional(ticks) : std::nullopt;
}

std::chrono::nanoseconds process_age() {
  timespec booted{};
  const std::optional<uint64_t> started = start_time(process_id());
  const long ticks = ::sysconf(_SC_CLK_TCK);
  if (!started || ticks <= 0 || ::clock_gettime(CLOCK_BOOTTIME, &booted) != 0) return {};
  const auto since_boot = std::chrono::seconds(booted.tv_sec) + std::chrono::nanoseconds(booted.tv_nsec);
  return since_boot - std::chrono::nanoseconds(*started * (1'000'000'000 / static_cast<uint64_t>(ticks)));
}

std::chrono::nanoseconds thread_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace tesserae::os
