#include "tesserae/train/folder_owner.h"

#include "tesserae/base/log.h"
#include "tesserae/config/json.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/host.h"
#include "tesserae/os/process.h"
#include "tesserae/os/random_name.h"

// How a folder has one owner at a time:
//  1. FOLDER/owner.lock is locked until the process ends. A second run is refused before it has touched anything, also
//     one on another host where the file system carries locks between hosts.
//  2. FOLDER/owner.json says who: the identity of the folder (random, made by its first owner and kept by the others),
//     a generation that each owner raises, host and process. It is replaced as a whole, and lasting before anything
//     else is written.
//     A run that goes on without the rank that had the folder may find the lock still there: file systems of several
//     hosts keep those of a host that has lost its power for a while. It waits, and then goes by the generation alone.
//  3. Before a checkpoint is committed the generation is read again. Where locks do not reach, the later owner wins and
//     the earlier one stops at its next checkpoint: there is never one of both.
namespace tesserae::train {
namespace {

constexpr const char* lock_name = "owner.lock";
constexpr const char* owner_name = "owner.json";

/// What owner.json says; an empty object if there is none, or none that can be read.
config::Json read_owner(const os::Path& folder) {
  os::Files& files = os::files();
  if (!files.exists(folder / owner_name)) return config::Json::object();
  config::Json owner = config::Json::parse(files.read(folder / owner_name), nullptr, /*allow_exceptions=*/false);
  const bool whole = owner.is_object() && owner.contains("identity") && owner["identity"].is_string() &&
                     owner.contains("generation") && owner["generation"].is_number_integer();
  return whole ? owner : config::Json::object();
}

std::string name_of(const config::Json& owner) {
  if (owner.empty()) return "another run";
  return cat("process ", owner.value("process", int64_t{0}), " on host ", owner.value("host", std::string("?")));
}

}  // namespace

FolderOwner::FolderOwner(const os::Path& folder, const std::optional<Lost>& lost) : folder_(folder) {
  os::Files& files = os::files();
  files.make_directories(folder);
  bool locks = true;
  try {
    const os::Deadline patience(lost.value_or(Lost()).patience);
    const auto try_lock = [&] { return os::FileLock::try_lock(folder / lock_name); };  // 1
    for (lock_ = try_lock(); !lock_ && !patience.passed(); lock_ = try_lock()) {
      os::sleep_for(std::chrono::milliseconds(100));
    }
  } catch (const IoError& error) {
    locks = false;
    log(LogLevel::warning, cat(error.what(),
                               "; a second run in this folder will not be refused, and the first of them "
                               "stops at its next checkpoint"));
  }
  config::Json owner = read_owner(folder);
  if (locks && !lock_) {
    if (!lost || owner.value("generation", int64_t{0}) != lost->generation) {
      throw FolderInUse("train", cat("a live run has the folder ", folder.native(), ": ", name_of(owner),
                                     "; wait for it, stop it, or choose another run.folder"));
    }
    log(LogLevel::warning, cat("the lock of ", folder.native(),
                               ", which a lost rank had, is there still: the run goes on ", "without it"));
  }
  identity_ = owner.value("identity", os::random_name() + os::random_name());  // 2
  generation_ = owner.value("generation", int64_t{0}) + 1;
  owner = {{"identity", identity_},
           {"generation", generation_},
           {"host", os::host_name()},
           {"process", static_cast<int64_t>(os::process_id())}};
  const os::Path draft = folder / cat(owner_name, ".", os::process_id());
  try {
    files.write_synced(draft, owner.dump() + "\n");
    files.rename(draft, folder / owner_name);
  } catch (const IoError&) {
    files.remove_all(draft);
    throw;
  }
  files.sync_directory(folder);
}

void FolderOwner::require() const {
  const config::Json owner = read_owner(folder_);  // 3
  if (owner.value("generation", generation_) == generation_ && owner.value("identity", identity_) == identity_) return;
  throw FolderInUse("train", cat(name_of(owner), " has taken over the folder ", folder_.native(),
                                 " since this run began in it; this run ends and commits nothing"));
}

}  // namespace tesserae::train
