#pragma once

#include <cstdint>
#include <string>

namespace tesserae::os {

/// A TCP port of the loopback interface that nobody listens on now. Another process may take it before the caller does:
/// the kernel hands such ports out in an order that makes this rare.
uint16_t free_port();

/// The address under which a host that has `address` reaches this one: of the interface by which this one reaches that.
/// Nothing is sent. Throws IoError if `address` cannot be looked up, or there is no way to it.
std::string own_address_towards(const std::string& address);

}  // namespace tesserae::os
