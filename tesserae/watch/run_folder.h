#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/os/clock.h"
#include "tesserae/os/files.h"

namespace tesserae::watch {

using Json = nlohmann::ordered_json;

/// What the files of a run folder say, for the page. It reads a fixed list of files (docs/monitor.md), never through a
/// symbolic link, and writes nothing. The run may be alive, over, or dead in the middle of a line: a file that is
/// missing is nothing; one that is cut off is what it was when it was last whole.
///
/// Thread-safe. Errors of the system are taken for "missing": a page that shows less is better than none.
class RunFolder {
 public:
  /// `begins`: the run writes its first file soon. Throws InvalidArgument if there is no such folder or, unless it
  /// begins, nothing of a run in it: the text names the runs below it, if there are any.
  explicit RunFolder(const os::Path& folder, bool begins = false);

  const os::Path& path() const { return folder_; }

  /// A JSON document as it was written.
  using Document = std::shared_ptr<const std::string>;
  Document now();  ///< monitor/now.json; null: none yet

  /// Whether the job is there, as far as its files tell.
  struct Life {
    bool live = false;          ///< it has told of itself within 10 s
    bool ended = false;         ///< it said goodbye, or left a summary
    bool died = false;          ///< it did not, and is silent; also: its host hangs
    double silent_seconds = 0;  ///< since it last told of itself
  };
  Life life();

  /// {"name", "folder", "live", "ended", "died", "silent_seconds", "time", "has": {"now", "timeline", "dial"}: what
  /// is worth asking for, "config", "summary"}; null for what is missing.
  Json run();

  /// monitor/timeline.json with at most `count` ranks, from the index `from` on, and "total": how many it has.
  std::optional<std::string> timeline(size_t from, size_t count);

  /// Whole lines of a file that grows.
  struct Lines {
    std::string text;
    uint64_t from = 0;  ///< where they begin; 0 instead of what was asked for: the file is another one
    uint64_t next = 0;  ///< where to go on
    uint64_t size = 0;  ///< of the file now
    std::string mark;   ///< of what is before `next`: in another file, something else is
  };
  static constexpr uint64_t most_line_bytes = 1 << 20;  ///< of an answer; a line longer than that is left out
  /// metrics.jsonl. `mark`: of the lines that ended at `from`; empty: not known. A run that goes back, or is resumed,
  /// puts another file in its place, which may be as long.
  Lines metrics(uint64_t from, const std::string& mark = {}) const;
  Lines events(uint64_t from, const std::string& mark = {}) const;  ///< monitor/events.jsonl
  /// The last whole line of metrics.jsonl; null: none.
  Json last_metrics() const;

 private:
  struct Kept {
    std::chrono::system_clock::time_point modified = {};
    uint64_t size = 0;
    Document document;
  };
  /// Where the parts of a timeline lie in its document.
  struct Timeline {
    Document document;
    std::string head;                // all but the ranks, without the closing brace
    std::vector<std::string> ranks;  // each as text
  };

  Document read(const char* name);
  Json parsed(const char* name);
  Lines lines(const char* name, uint64_t from, const std::string& mark) const;

  os::Path folder_;
  std::mutex mutex_;  // of all below
  std::map<std::string, Kept> kept_;
  Timeline timeline_;
  std::optional<double> told_;           // the "time" of now.json when it was last looked at
  std::optional<os::TimePoint> looked_;  // when that was
  os::TimePoint changed_ = {};           // when "time" was first seen to have changed
  double age_then_ = 0;                  // how old it was then
};

}  // namespace tesserae::watch
