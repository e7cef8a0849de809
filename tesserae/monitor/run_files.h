#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tesserae/monitor/board.h"
#include "tesserae/os/files.h"

namespace tesserae::monitor {

/// The folder RUN/monitor/ and what rank 0 writes there. One process writes, from one thread; readers find each file
/// whole. docs/monitor.md has the fields.
///
///   now.json       what is known of the ranks, replaced
///   timeline.json  what each did in one of the last steps, replaced
///   events.jsonl   what happened, a line each, appended
///   stacks-R.txt   the stacks of all threads of rank R, replaced
///   trace-S.json   what each rank did in steps S to S + n, for Perfetto
class RunFiles {
 public:
  static constexpr const char* folder_name = "monitor";

  /// Makes the folder; what an earlier part of the run wrote stays, but for now.json. Throws IoError.
  explicit RunFiles(const os::Path& run);

  // Each logs, once, what cannot be written: that is no reason for a job to end.
  void write_now(const Json& now);
  void write_timeline(const Json& timeline);
  /// The path; nothing if it could not be written.
  std::optional<os::Path> write_stacks(int rank, const std::string& text);
  std::optional<os::Path> write_trace(int64_t first_step, const std::string& trace);
  void add(const Event& event);

 private:
  std::optional<os::Path> replace(const std::string& name, const std::string& text);

  os::Path folder_;
  std::unique_ptr<os::WritableFile> events_;
  bool told_ = false;
};

/// Unix seconds by the wall clock.
double unix_time();

}  // namespace tesserae::monitor
