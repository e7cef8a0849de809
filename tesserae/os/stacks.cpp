// How a thread's frames are taken:
//  1. the asking thread gives the other one a slot, and sends it the signal with the slot's address;
//  2. the other one's handler walks up its own stack, writes the frames into the slot and marks it as answered;
//  3. the asking thread waits for the marks, then gives the addresses names. The handler allocates nothing, takes no
//  lock
//     and waits for nobody.
// A slot belongs to its thread until that has answered or is gone: an answer that comes too late harms nobody.
#include "tesserae/os/stacks.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/failure.h"
#include "tesserae/os/fork.h"
#include "tesserae/os/symbols.h"

namespace tesserae::os {
namespace {

constexpr size_t most_frames = 128;

struct StackSlot {
  pid_t thread = 0;
  size_t count = 0;
  std::array<uintptr_t, most_frames> frames;  // addresses within the calls, as symbols want them
  std::atomic<bool> answered{false};          // all above is written; false: it is the handler's to write
};
static_assert(std::atomic<bool>::is_always_lock_free, "used by a signal handler");

struct Walk {
  StackSlot& slot;
  uintptr_t begin;  // frames inside of this one are the handler's own; 0: none are
};

_Unwind_Reason_Code note_frame(_Unwind_Context* context, void* argument) {
  Walk& walk = *static_cast<Walk*>(argument);
  int interrupted = 0;  // else the address is where a call returns to, which may lie behind the function
  const uintptr_t address = _Unwind_GetIPInfo(context, &interrupted);
  if (address == 0) return _URC_END_OF_STACK;
  if (walk.begin != 0 && address != walk.begin) return _URC_NO_REASON;
  walk.begin = 0;
  walk.slot.frames[walk.slot.count++] = interrupted != 0 ? address : address - 1;
  return walk.slot.count < most_frames ? _URC_NO_REASON : _URC_END_OF_STACK;
}

void note_stack(StackSlot& slot, uintptr_t begin) {
  Walk walk{.slot = slot, .begin = begin};
  slot.count = 0;
  _Unwind_Backtrace(note_frame, &walk);
  if (slot.count == 0 && begin != 0) slot.frames[slot.count++] = begin;  // code that says nothing of its frames
  slot.answered.store(true, std::memory_order_release);
}

uintptr_t interrupted_at(const void* context) {
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return static_cast<uintptr_t>(machine.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return machine.pc;
#else
#error "which register has the address of the next instruction?"
#endif
}

extern "C" void answer_with_stack(int, siginfo_t* info, void* context) {
  if (info->si_code != SI_QUEUE || info->si_pid != ::getpid()) return;  // somebody else's
  const int error = errno;
  auto& slot = *static_cast<StackSlot*>(info->si_value.sival_ptr);
  if (!slot.answered.load(std::memory_order_acquire)) note_stack(slot, interrupted_at(context));
  errno = error;
}

/// A file of the thread in /proc. Past Files: nothing that a test does to files must hide a thread.
std::string thread_file(pid_t thread, std::string_view name) {
  const Descriptor file(::open(cat("/proc/self/task/", thread, "/", name).c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return {};
  std::string text(4096, '\0');
  const ssize_t count = ::read(file.get(), text.data(), text.size());
  text.resize(count < 0 ? 0 : static_cast<size_t>(count));
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

/// Whether the set of signals that a line of `status` gives as a hexadecimal number has this one.
bool has_signal(std::string_view status, std::string_view key, int number) {
  const size_t at = status.find(key);
  if (at == std::string_view::npos) return false;
  uint64_t set = 0;
  std::from_chars(status.data() + at + key.size(), status.data() + status.size(), set, 16);
  return (set >> (number - 1) & 1) != 0;
}

std::string state_of(pid_t thread, std::string_view status) {
  const size_t at = status.find("State:\t");
  const char letter = at == std::string_view::npos ? '?' : status.at(at + 7);
  if (letter == 'R') return "running";
  const std::string place = thread_file(thread, "wchan");
  const std::string in = place.empty() || place == "0" ? "" : " in " + place;
  switch (letter) {
    case 'S':
      return "sleeping" + in;
    case 'D':
      return "sleeping uninterruptibly" + in;
    case 'T':
      return "stopped";
    case 't':
      return "stopped by a debugger";
    default:
      return "ended";  // the first thread is listed while others live
  }
}

std::vector<pid_t> threads_of_this_process() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/task"), &::closedir);
  if (!folder) throw failure("thread_stacks", "/proc/self/task", "cannot list the threads");
  std::vector<pid_t> threads;
  while (const dirent* entry = ::readdir(folder.get())) {
    if (entry->d_name[0] != '.') threads.push_back(static_cast<pid_t>(std::atoi(entry->d_name)));
  }
  std::ranges::sort(threads);
  return threads;
}

bool thread_is_there(pid_t thread) {
  return ::syscall(SYS_tgkill, ::getpid(), thread, 0) == 0;
}

/// What asks. A process has one, which is never destroyed: handlers may run late.
class StackTaker {
 public:
  std::vector<ThreadStack> take(std::chrono::milliseconds patience);
  bool is_of_parent() const { return made_.in_child(); }

 private:
  struct Asked {
    ThreadStack stack;
    StackSlot* slot;  // none: it was not asked
  };

  void take_signal();
  StackSlot* free_slot();
  Asked ask(pid_t thread);
  void wait_for(const std::vector<Asked>& asked, const Deadline& deadline) const;

  ForkGuard made_;
  std::mutex mutex_;
  int signal_ = 0;
  std::deque<StackSlot> slots_;  // each is here for ever: whatever fails, a handler may still write into it
  std::vector<StackSlot*> free_;
  std::vector<StackSlot*> late_;  // of threads that have not answered yet
};

void StackTaker::take_signal() {
  const auto handler_of = [](int number) {
    struct sigaction now {};
    ::sigaction(number, nullptr, &now);
    return now;
  };
  if (signal_ == 0) {  // The first use of the unwinder loads it and allocates, which a handler must not.
    StackSlot unused;
    note_stack(unused, 0);
  } else if (handler_of(signal_).sa_sigaction == answer_with_stack) {
    return;
  }
  for (int number = SIGRTMAX; number >= SIGRTMIN; --number) {
    const struct sigaction now = handler_of(number);
    const bool ours = (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == answer_with_stack;  // the parent's
    if (!ours && ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL)) continue;
    struct sigaction action {};
    action.sa_sigaction = answer_with_stack;
    // On the thread's other stack if it has one: its own may be used up, or be that of a coroutine.
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (!ours && ::sigaction(number, &action, nullptr) != 0) continue;
    signal_ = number;
    return;
  }
  throw IoError("thread_stacks", cat("each of the signals ", SIGRTMIN, " to ", SIGRTMAX,
                                     " has a handler, and this needs one of its own; let go of one"));
}

StackSlot* StackTaker::free_slot() {
  if (free_.empty()) return &slots_.emplace_back();
  StackSlot* const slot = free_.back();
  free_.pop_back();
  return slot;
}

StackTaker::Asked StackTaker::ask(pid_t thread) {
  const std::string status = thread_file(thread, "status");  // before it is disturbed
  Asked asked{.stack = {.id = thread,
                        .name = thread_file(thread, "comm"),
                        .state = state_of(thread, status),
                        .frames = {},
                        .note = {}},
              .slot = nullptr};
  if (asked.stack.state == "ended") return asked;
  if (thread == ::gettid()) {
    asked.slot = free_slot();
    note_stack(*asked.slot, 0);
    return asked;
  }
  if (has_signal(status, "SigBlk:\t", signal_)) {
    asked.stack.note = cat("it blocks signal ", signal_, ", which asks for its frames");
    return asked;
  }
  if (has_signal(status, "SigPnd:\t", signal_)) {
    asked.stack.note = "it has not answered an earlier question yet";
    return asked;
  }
  asked.slot = free_slot();
  asked.slot->thread = thread;
  asked.slot->answered.store(false, std::memory_order_release);
  siginfo_t info{};
  info.si_code = SI_QUEUE;
  info.si_pid = ::getpid();
  info.si_uid = ::getuid();
  info.si_value.sival_ptr = asked.slot;
  if (::syscall(SYS_rt_tgsigqueueinfo, ::getpid(), thread, signal_, &info) != 0) {
    if (errno != ESRCH) asked.stack.note = failure("thread_stacks", cat("thread ", thread), "cannot ask it").what();
    free_.push_back(std::exchange(asked.slot, nullptr));
  }
  return asked;
}

void StackTaker::wait_for(const std::vector<Asked>& asked, const Deadline& deadline) const {
  for (const Asked& one : asked) {
    std::chrono::microseconds pause(20);
    while (one.slot && !one.slot->answered && thread_is_there(one.stack.id) && !deadline.passed()) {
      sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(2000));
    }
  }
}

std::vector<ThreadStack> StackTaker::take(std::chrono::milliseconds patience) {
  const std::scoped_lock lock(mutex_);
  take_signal();
  std::erase_if(late_, [this](StackSlot* slot) {
    if (!slot->answered && thread_is_there(slot->thread)) return false;
    free_.push_back(slot);
    return true;
  });
  std::vector<Asked> all;
  for (const pid_t thread : threads_of_this_process()) all.push_back(ask(thread));
  wait_for(all, Deadline(patience));

  std::vector<uintptr_t> addresses;
  for (Asked& one : all) {
    if (!one.slot) continue;
    if (one.slot->answered.load(std::memory_order_acquire)) {
      addresses.insert(addresses.end(), one.slot->frames.begin(), one.slot->frames.begin() + one.slot->count);
    } else if (thread_is_there(one.stack.id)) {
      one.stack.note = cat("it did not answer within ", patience.count(),
                           " ms: it is where no signal reaches it, or gets no processor");
      late_.push_back(std::exchange(one.slot, nullptr));
    } else {
      free_.push_back(std::exchange(one.slot, nullptr));
    }
  }
  const std::map<uintptr_t, std::string> names = names_of_code(addresses);
  std::vector<ThreadStack> stacks;
  for (Asked& one : all) {
    if (!one.slot && one.stack.note.empty()) continue;  // it has ended
    for (size_t i = 0; one.slot && i < one.slot->count; ++i) {
      one.stack.frames.push_back(names.at(one.slot->frames[i]));
    }
    stacks.push_back(std::move(one.stack));
    if (one.slot) free_.push_back(one.slot);
  }
  return stacks;
}

constinit std::atomic<StackTaker*> stack_taker{nullptr};

/// A forked child has one of its own: in the parent a thread may have held the mutex, and it is not in the child.
StackTaker& stack_taker_of_process() {
  StackTaker* now = stack_taker;
  while (now == nullptr || now->is_of_parent()) {
    auto made = std::make_unique<StackTaker>();
    if (stack_taker.compare_exchange_strong(now, made.get())) return *made.release();
  }
  return *now;
}

}  // namespace

std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds patience) {
  return stack_taker_of_process().take(patience);
}

std::string to_text(const std::vector<ThreadStack>& stacks) {
  const auto below_header = [](const ThreadStack& stack) {
    std::string text = stack.note.empty() ? "" : cat("  no frames: ", stack.note, "\n");
    for (size_t i = 0; i < stack.frames.size(); ++i)
      text += cat(i < 10 ? "   #" : "  #", i, " ", stack.frames[i], "\n");
    return text;
  };
  std::vector<std::pair<std::string, std::string>> groups;  // headers, and what is the same below them
  for (const ThreadStack& stack : stacks) {
    const std::string below = below_header(stack);
    auto group = std::ranges::find(groups, below, &std::pair<std::string, std::string>::second);
    if (group == groups.end()) group = groups.insert(groups.end(), {"", below});
    group->first += cat("thread ", stack.id, " \"", stack.name, "\", ", stack.state, "\n");
  }
  std::string text;
  for (const auto& [headers, below] : groups) text += cat(text.empty() ? "" : "\n", headers, below);
  return text;
}

}  // namespace tesserae::os
