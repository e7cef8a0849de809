// Preloaded into a process (LD_PRELOAD): a wall clock that a test sets by writing seconds, a number of 8 bytes, to the
// file that STEPPED_CLOCK names. What asks for the time of day gets that of the machine and so much more; what waits on
// a condition until an instant of it goes by it, too, as in a process whose host's clock is stepped meanwhile.
// (libtorch's condition variables wait so, whatever clock they are asked for: glibc 2.28, for which it is built, has no
// other way.)
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <ctime>

namespace {

const volatile int64_t* mapped() {
  const char* const path = std::getenv("STEPPED_CLOCK");
  const int file = path != nullptr ? ::open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return nullptr;
  void* const memory = ::mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  ::close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<const volatile int64_t*>(memory);
}

int64_t ahead() {
  static const volatile int64_t* const seconds = mapped();
  return seconds != nullptr ? *seconds : 0;
}

timespec machine_time(clockid_t clock) {
  timespec time{};
  ::syscall(SYS_clock_gettime, clock, &time);
  return time;
}

bool before(const timespec& a, const timespec& b) {
  return a.tv_sec != b.tv_sec ? a.tv_sec < b.tv_sec : a.tv_nsec < b.tv_nsec;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int64_t result = ::syscall(SYS_clock_gettime, clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += ahead();
  return static_cast<int>(result);
}

int gettimeofday(timeval* time, void* /*zone*/) noexcept {
  const timespec now = machine_time(CLOCK_REALTIME);
  *time = {now.tv_sec + ahead(), now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* to) noexcept {
  const time_t now = machine_time(CLOCK_REALTIME).tv_sec + ahead();
  if (to != nullptr) *to = now;
  return now;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  constexpr unsigned monotonic = 2;  // glibc's mark of a condition that was made for that clock
  if ((condition->__data.__wrefs & monotonic) != 0) {
    return ::pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
  }
  // In pieces: the clock may be stepped while this waits.
  for (;;) {
    timespec end = *until;
    end.tv_sec -= ahead();
    const timespec now = machine_time(CLOCK_REALTIME);
    if (!before(now, end)) end = now;
    timespec piece = now;
    piece.tv_nsec += 50'000'000;
    if (piece.tv_nsec >= 1'000'000'000) piece = {piece.tv_sec + 1, piece.tv_nsec - 1'000'000'000};
    const bool last = !before(piece, end);
    const int result = ::pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, last ? &end : &piece);
    if (result != ETIMEDOUT || last) return result;
  }
}

}  // extern "C"
