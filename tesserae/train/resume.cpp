#include "tesserae/train/resume.h"

#include <filesystem>
#include <functional>

#include "tesserae/checkpoint/folder.h"
#include "tesserae/comm/agree.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/metrics.h"
#include "tesserae/train/run_folder.h"

namespace tesserae::train {
namespace {

constexpr const char* checkpoints_name = "checkpoints";

os::Path without_slash(const std::string& text) {
  os::Path path = os::Path(text).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

os::Path checkpoints_of(const config::Config& config, const os::Path& run) {
  return config.checkpoint.folder ? os::Path(*config.checkpoint.folder) : run / checkpoints_name;
}

/// The two paths lead to the same directory, however they are written.
bool same_place(const os::Path& a, const os::Path& b) {
  std::error_code missing;
  return std::filesystem::equivalent(a, b, missing) && !missing;
}

bool is_newest_of(const os::Path& path, const os::Path& checkpoints) {
  if (same_place(path, checkpoints)) return true;
  const std::vector<checkpoint::Committed> committed = checkpoint::list_checkpoints(checkpoints);
  return !committed.empty() && same_place(path, committed.back().path);
}

/// The metrics of the run that saved the checkpoint at `path`, where runs usually have them; empty: not there.
os::Path metrics_beside(const os::Path& path) {
  for (os::Path above = path.parent_path(); !above.empty(); above = above.parent_path()) {
    if (os::files().exists(above / metrics_name)) return above / metrics_name;
    if (above.filename() != checkpoints_name) break;
  }
  return {};
}

RunFolders choose(const config::Config& config, const Resume& resume) {
  const os::Path own = without_slash(config.run.folder);
  const os::Path own_checkpoints = checkpoints_of(config, own);
  RunFolders folders;
  if (resume.mode == Resume::Mode::automatic ||
      (resume.mode == Resume::Mode::path && is_newest_of(resume.path, own_checkpoints))) {
    os::files().make_directories(own);
    folders.run = own;
    folders.continues = true;
    folders.history = own / metrics_name;
  } else {
    folders.run = make_run_folder(config.run.folder);
    if (resume.mode == Resume::Mode::path) folders.history = metrics_beside(resume.path);
  }
  folders.checkpoints = checkpoints_of(config, folders.run);
  return folders;
}

/// Rank 0 has made its folders; what went wrong is an error of all ranks. Then all know the same.
void share_folders(comm::Fabric& fabric, const config::Config& config, const std::function<RunFolders()>& make,
                   RunFolders& folders) {
  std::string failure, taken;
  if (fabric.rank() == 0) {
    try {
      folders = make();
      // Others wait for this meanwhile.
      const auto lost = [&](int64_t generation) -> std::optional<FolderOwner::Lost> {
        if (generation == 0) return std::nullopt;
        return FolderOwner::Lost{generation, os::milliseconds(config.run.deadline_seconds / 2)};
      };
      if (!folders.run_owner) {
        folders.run_owner = std::make_shared<const FolderOwner>(folders.run, lost(folders.run_generation));
      }
      folders.run_generation = folders.run_owner->generation();
      folders.run_identity = folders.run_owner->identity();
      if (config.checkpoint.enabled() && same_place(folders.run, folders.checkpoints)) {
        folders.checkpoints_owner = folders.run_owner;  // it would refuse itself
        folders.identity = folders.run_identity;
      } else if (config.checkpoint.enabled() && !folders.checkpoints_owner) {
        folders.checkpoints_owner =
            std::make_shared<const FolderOwner>(folders.checkpoints, lost(folders.checkpoints_generation));
        folders.identity = folders.checkpoints_owner->identity();
      }
      if (folders.checkpoints_owner) folders.checkpoints_generation = folders.checkpoints_owner->generation();
    } catch (const FolderInUse& error) {
      taken = config::without_function(error);
    } catch (const IoError& error) {
      failure = error.what();
    }
  }
  taken = comm::text_of(fabric, taken, 0);
  if (!taken.empty()) throw FolderInUse("train", taken);
  failure = comm::text_of(fabric, failure, 0);
  if (!failure.empty()) throw IoError("train", cat("rank 0 cannot claim its folders: ", failure));
  folders.identity = comm::text_of(fabric, folders.identity, 0);
  folders.run_identity = comm::text_of(fabric, folders.run_identity, 0);
  const auto generations = comm::counts_over_ranks(fabric, {folders.run_generation, folders.checkpoints_generation});
  folders.run_generation = generations[0];  // only rank 0's were not 0
  folders.checkpoints_generation = generations[1];
  folders.run = comm::text_of(fabric, folders.run.native(), 0);
  folders.history = comm::text_of(fabric, folders.history.native(), 0);
  folders.continues = comm::text_of(fabric, folders.continues ? "yes" : "no", 0) == "yes";
  folders.checkpoints = checkpoints_of(config, folders.run);
}

}  // namespace

Resume Resume::from_text(const std::string& text) {
  if (text.empty() || text == "never") return {};
  if (text == "auto") return {.mode = Mode::automatic};
  const os::Path path = without_slash(text);
  const auto is_directory = [](const os::Path& at) { return os::files().status(at).kind == os::FileKind::directory; };
  if (is_directory(path / checkpoints_name)) return {.mode = Mode::path, .path = path / checkpoints_name};
  if (is_directory(path)) return {.mode = Mode::path, .path = path};
  throw config::ConfigError(
      "", cat("--resume takes auto, never, a checkpoint, a folder of them or a run folder; there is no folder ",
              path.native()));
}

RunFolders choose_folders(comm::Fabric& fabric, const config::Config& config, const Resume& resume) {
  RunFolders folders;
  share_folders(
      fabric, config, [&] { return choose(config, resume); }, folders);
  return folders;
}

RunFolders join_folders(comm::Fabric& fabric, const config::Config& config, const Resume& resume, const os::Path& run,
                        const std::optional<RunFolders>& own) {
  RunFolders folders;
  const auto join = [&] {
    RunFolders joined = own.value_or(RunFolders{});
    joined.run = run;
    joined.checkpoints = checkpoints_of(config, run);
    joined.continues = resume.mode == Resume::Mode::automatic || os::files().exists(run / metrics_name);
    joined.history = run / metrics_name;
    if (!joined.continues && resume.mode == Resume::Mode::path) joined.history = metrics_beside(resume.path);
    return joined;
  };
  share_folders(fabric, config, join, folders);
  return folders;
}

}  // namespace tesserae::train
