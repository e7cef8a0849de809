#pragma once

#include <cstdint>

namespace tesserae::os {

/// A TCP port of the loopback interface that nobody listens on now. Another process may take it before the caller does:
/// the kernel hands such ports out in an order that makes this rare.
uint16_t free_port();

}  // namespace tesserae::os
