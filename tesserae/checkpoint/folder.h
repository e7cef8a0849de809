#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

/// A committed checkpoint: a directory "step-N", or "step-N.K" if step N was committed before (the K-th time again).
struct Committed {
  os::Path path;
  int64_t step = 0;
  int64_t version = 0;

  auto key() const { return std::pair(step, version); }
};

inline constexpr std::string_view manifest_name = "manifest.json";

/// What a name in a folder of checkpoints means; nothing for a name that is no committed checkpoint's.
std::optional<Committed> parse_committed(const os::Path& folder, std::string_view name);
/// Whether `path` stands for one checkpoint, not for a folder of them: it has a manifest, or is called as one and has
/// none in it. That one may be gone, or have lost its manifest, and is still what was meant.
bool means_one(const os::Path& path);
/// True for what an unfinished or abandoned save left: names that end in ".tmp" and begin like a checkpoint's.
bool is_stray(std::string_view name);

/// Of such a name: the step, and what names the save ("step-N.ATTEMPT.tmp"). Nothing for other names.
struct Stray {
  int64_t step = 0;
  std::string attempt;
};
std::optional<Stray> parse_stray(std::string_view name);

/// The committed checkpoints of a folder, oldest step first, found by looking: there is no pointer that could be stale.
/// A folder that is missing has none. Whether they can be read is not looked at.
std::vector<Committed> list_checkpoints(const os::Path& folder);
/// The last of them that is of that step; nothing: there is none.
std::optional<Committed> last_of_step(const os::Path& folder, int64_t step);

/// The folder is another job's by now: what a fence throws (SaveJob::fence). No later save of this job succeeds.
class FolderTaken : public IoError {
 public:
  using IoError::IoError;
};

/// Takes a damaged checkpoint out of the list, for someone to look at: its name becomes "step-N.damaged". Throws
/// IoError.
os::Path set_aside(const os::Path& checkpoint);

}  // namespace tesserae::checkpoint
