#pragma once

#include <string>

#include "tesserae/dial/protocol.h"

namespace tesserae::cli {

/// Asks a running job through its monitor's socket (monitor/requests.h) and returns the last event. Throws
/// InvalidArgument for what the job refuses, IoError if it has not answered within `seconds`.
dial::Json ask_monitor(const std::string& folder, const dial::Json& request, double seconds);
/// The same through its dial's socket (dial/protocol.h).
dial::Json ask_dial(const std::string& folder, const dial::Json& request, double seconds);

/// Why a run refused, without the name of the function that it came from.
std::string message_of(const dial::Json& event);

}  // namespace tesserae::cli
