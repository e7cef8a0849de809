#include "tesserae/base/log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace tesserae {
namespace {

std::atomic<int> log_rank{-1};

LogLevel lowest_level() {
  const char* text = std::getenv("TESSERAE_LOG");
  const std::string_view level = text == nullptr ? "" : text;
  if (level == "debug") return LogLevel::debug;
  if (level == "info") return LogLevel::info;
  if (level == "error") return LogLevel::error;
  return LogLevel::warning;
}

}  // namespace

bool log_enabled(LogLevel level) {
  static const LogLevel lowest = lowest_level();
  return level >= lowest;
}

void log(LogLevel level, std::string_view message) {
  if (!log_enabled(level)) return;
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  const int rank = log_rank.load();
  const int length = static_cast<int>(message.size());
  if (rank < 0) {
    std::fprintf(stderr, "tesserae: %.*s\n", length, message.data());
  } else {
    std::fprintf(stderr, "tesserae: rank %d: %.*s\n", rank, length, message.data());
  }
}

void set_log_rank(int rank) {
  log_rank = rank;
}

}  // namespace tesserae
