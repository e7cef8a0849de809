#include "tesserae/os/wake_up.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include "tesserae/os/failure.h"

namespace tesserae::os {

WakeUp::WakeUp() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw failure("WakeUp", "eventfd", "cannot create");
}

void WakeUp::wake() noexcept {
  const uint64_t one = 1;
  // It fails only where the counter is full: then it is awake already.
  [[maybe_unused]] const ssize_t done = ::write(event_.get(), &one, sizeof one);
}

void WakeUp::clear() noexcept {
  uint64_t count;
  [[maybe_unused]] const ssize_t done = ::read(event_.get(), &count, sizeof count);
}

}  // namespace tesserae::os
