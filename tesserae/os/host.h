#pragma once

#include <string>

namespace tesserae::os {

std::string host_name();

/// Equal for two processes exactly if they run on the same booted machine, under the same name and with the same
/// process ids: tells which ranks share a host even where names repeat. Containers of one machine count as hosts of
/// their own: they cannot watch each other's processes or open their memory.
std::string host_identity();

/// How many processors this process may run on.
int processors();

}  // namespace tesserae::os
