#pragma once

#include <csignal>

namespace tesserae::os {

/// The signals that this project sends or waits for, so that no other layer includes the system's header.
inline constexpr int signal_interrupt = SIGINT;
inline constexpr int signal_terminate = SIGTERM;
inline constexpr int signal_kill = SIGKILL;
inline constexpr int signal_user = SIGUSR1;

}  // namespace tesserae::os
