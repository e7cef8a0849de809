#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/dial/protocol.h"
#include "tesserae/dial/tuner.h"
#include "tesserae/os/files.h"

namespace tesserae::dial {

/// What a tuner was told and what it decided, as lines of JSON: `dial.jsonl` in the run folder. The first line of a
/// tuner's life holds its facts, links and options; each further one an observation, with the decision if there was
/// one. So every decision can be explained, and made again, from the file alone.
class Record {
 public:
  explicit Record(const os::Path& path) : file_(os::files().append(path)) {}

  // Each throws IoError if the line cannot be written.
  void begin(const cost::Facts& facts, const cost::Links& links, const TunerOptions& options);
  void add(const Observation& seen, const std::optional<Decision>& decision);

 private:
  std::unique_ptr<os::WritableFile> file_;
};

struct Recorded {
  Observation seen;
  std::optional<Decision> decision;
};

/// Runs the observations of a record through new tuners; returns what it holds and what they decide, line by line.
/// Throws Corruption for a text that is no record.
struct Replay {
  std::vector<Recorded> recorded;
  std::vector<std::optional<Decision>> decided;
};
Replay replay(const std::string& text);

}  // namespace tesserae::dial
