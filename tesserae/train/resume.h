#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tesserae/comm/fabric.h"
#include "tesserae/config/config.h"
#include "tesserae/os/files.h"
#include "tesserae/train/folder_owner.h"

namespace tesserae::train {

/// From where a run starts: what --resume says.
struct Resume {
  enum class Mode {
    never,      ///< from step 0, in a run folder of its own
    automatic,  ///< from the newest checkpoint of this run that can be loaded, in its own folder; else from step 0
    path,       ///< from a checkpoint that is named
  };
  Mode mode = Mode::never;
  os::Path path = {};  ///< with Mode::path: a checkpoint, or a folder of them (its newest)

  /// "never", "auto" or the path of a checkpoint, a folder of them or a run folder ("./auto" for one of that name).
  /// Throws config::ConfigError for a path where there is nothing.
  static Resume from_text(const std::string& text);
};

/// Where a run writes.
struct RunFolders {
  os::Path run;            ///< metrics, configuration, summary
  os::Path checkpoints;    ///< whether or not this run saves any
  bool continues = false;  ///< the run folder is that of the run that is continued
  /// The metrics of the run that is continued: their lines up to the step of the checkpoint are this run's too. Empty:
  /// none.
  os::Path history;
  /// Of `checkpoints`, where this run saves any: its snapshots in memory are known by it. Empty: it saves none.
  std::string identity = {};
  /// Of `run`: checkpoints say so of which run they are.
  std::string run_identity = {};
  /// Rank 0's claims; the second where this run saves checkpoints.
  std::shared_ptr<const FolderOwner> run_owner = {}, checkpoints_owner = {};
  /// Their generations, on all ranks: whoever is rank 0 after it claims anew. 0: not claimed yet.
  int64_t run_generation = 0, checkpoints_generation = 0;
};

/// Chooses, makes and claims the run folder, and the folder of checkpoints if there are to be any:
///  - never: `run.folder`, or the first free of run.folder-2, -3, ...: no run overwrites another;
///  - automatic: `run.folder`, whatever it holds;
///  - path: `run.folder`, if what is named is the newest checkpoint of the run in there. Any other checkpoint begins
///    another run, with a folder chosen as for `never`: going back must not put two pasts in one folder.
/// Collective: rank 0 chooses and tells the others. Throws FolderInUse on all ranks if a live run has one of the
/// folders, and has touched nothing in it then; IoError if a folder cannot be made.
RunFolders choose_folders(comm::Fabric& fabric, const config::Config& config, const Resume& resume);

/// The folders of a run that goes on in `run` after ranks were lost, or begins there, as `resume` says; `own`, what
/// this rank knew of them, is kept where it has claims. A new rank 0 claims them: the process that had is gone.
/// Collective; throws as choose_folders() does.
RunFolders join_folders(comm::Fabric& fabric, const config::Config& config, const Resume& resume, const os::Path& run,
                        const std::optional<RunFolders>& own);

}  // namespace tesserae::train
