#include "tesserae/os/thread.h"

#ifdef __linux__
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace tesserae::os {

void yield_to_others() {
#ifdef __linux__
  // Of Linux, not of POSIX: there a thread has these of its own. To lower them is allowed to all. One of SCHED_BATCH
  // takes no processor away when it wakes up.
  const sched_param parameters{};
  static_cast<void>(::sched_setscheduler(::gettid(), SCHED_BATCH, &parameters));
  static_cast<void>(::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 19));
#endif
}

}  // namespace tesserae::os
