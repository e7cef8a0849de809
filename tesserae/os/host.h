#pragma once

#include <string>

namespace tesserae::os {

std::string host_name();

/// Equal for two processes exactly if they run on the same booted machine, under the same name and with the same
/// process ids: tells which ranks share a host even where names repeat. Containers of one machine count as hosts of
/// their own: they cannot watch each other's processes or open their memory.
std::string host_identity();

/// Of how many processors this process may have the time: those that it may run on, or its share of them where a
/// control group limits that (rounded up).
int processors();

}  // namespace tesserae::os
