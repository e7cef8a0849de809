#pragma once

#include <string>
#include <string_view>

namespace tesserae {

enum class LogLevel { debug, info, warning, error };

/// Writes one line "tesserae: message" (with the rank in front once it is known) to stderr. Thread-safe.
/// TESSERAE_LOG=debug|info|warning|error sets the lowest level that is shown; the default is warning.
void log(LogLevel level, std::string_view message);

/// True if a message of this level would be shown: guards messages that are costly to build.
bool log_enabled(LogLevel level);

/// The rank that log() puts in front of each line of this process. -1: none.
void set_log_rank(int rank);

}  // namespace tesserae
