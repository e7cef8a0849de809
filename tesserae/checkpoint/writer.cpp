#include "tesserae/checkpoint/writer.h"

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "tesserae/base/log.h"
#include "tesserae/checkpoint/block_reader.h"
#include "tesserae/checkpoint/crash_point.h"
#include "tesserae/checkpoint/data_file.h"
#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/manifest_text.h"
#include "tesserae/checkpoint/names.h"
#include "tesserae/os/clock.h"

// The commit protocol. FOLDER is seen by all ranks, WORK is FOLDER/step-N.ATTEMPT.tmp.
//   Every rank R:
//    1. Makes WORK, and FOLDER if it is missing (then it syncs the directory above); before that, rank 0 removes what
//       dead jobs left (*.tmp).
//    2. Writes WORK/rank-R.safetensors, syncs, closes.
//    3. Syncs WORK, so that the name of the file lasts. If it is asked to, reads the file from the medium and compares
//       its blocks with the checksums of what was written.
//    4. Writes its fragment of the manifest as WORK/rank-R.part, syncs, closes, and renames it to WORK/rank-R.done: who
//       sees the name sees all of it. Rank 0's has what 6 adds to the fragments, in case it never gets to 6.
//   A rank that fails in 1 to 4 leaves WORK/rank-R.failed with the reason, if it still can.
//   Rank 0:
//    5. Waits for the .done of all ranks; a .failed or the deadline ends the save.
//    6. Joins the fragments, checks that no element is missing or doubled, and writes WORK/manifest.json, syncs,
//       closes.
//    7. Removes the .done marks and syncs WORK.
//    8. Asks the fence, if there is one, whether FOLDER is still this run's (so does 1). Renames WORK to FOLDER/step-N:
//       committed, as far as other processes can see. If step N is there already (a run that went back), the name is
//       step-N.K with the next K: a directory cannot be replaced in one step, and at no moment may the newest
//       checkpoint be gone.
//    9. Syncs FOLDER: committed, also if the power fails.
//   10. Only now sets aside what is older than `keep` allows (renames it to *.tmp), syncs FOLDER, and removes it. What
//       is removed piece by piece does not carry a checkpoint's name at that time. Later steps, of a past that this run
//       does not continue, neither count nor are removed.
//
// A save whose ranks have come to the end of 4, and whose rank 0 has not come to 8, can be committed by whoever has
// nobody else in FOLDER (commit_left_behind): it goes on with 6, or, if the manifest is whole, with 7.
//
// Ended at any point, by a kill or a power failure, FOLDER has the newest committed checkpoint and those before it, and
// strays that the next save removes in 1. A name is unique to a save (ATTEMPT), so ranks never meet what an earlier job
// left. A failed sync is never tried again on the same descriptor: the whole save fails.
namespace tesserae::checkpoint {
namespace {

os::Path work_of(const SaveJob& job) {
  return job.folder / cat("step-", job.step, ".", job.attempt, ".tmp");
}

std::string mark_name(int rank, std::string_view kind) {
  return cat("rank-", rank, ".", kind);
}

void check(const SaveJob& job) {
  if (job.step < 0 || job.rank < 0 || job.rank >= job.ranks() || !file_name_defect(job.attempt).empty()) {
    throw InvalidArgument("write_part", cat("step ", job.step, ", rank ", job.rank, " of ", job.ranks(), ", attempt \"",
                                            job.attempt, "\": one of these cannot be"));
  }
}

/// A directory that holds only files, one after the other.
void remove_directory(const os::Path& path, int rank) {
  for (const std::string& name : os::files().list(path)) {
    os::files().remove_all(path / name);
    crash_point("old-half-removed", rank);
  }
  os::files().remove(path);
}

/// A thread of a save that was given up may come back from a storage that hung, and commit what it wrote: not what is
/// being removed, which has another name by then.
void remove_strays(const SaveJob& job) {
  constexpr std::string_view removed = ".removed.tmp";
  const std::string own = work_of(job).filename();
  for (const std::string& name : os::files().list(job.folder)) {
    if (!is_stray(name) || name == own) continue;
    try {
      const std::string aside = name.ends_with(removed) ? name : cat(name, removed);
      if (aside != name) os::files().rename(job.folder / name, job.folder / aside);
      os::files().remove_all(job.folder / aside);
    } catch (const IoError& failure) {
      log(LogLevel::warning, cat("what a dead job left could not be removed: ", failure.what()));
    }
  }
}

void leave_failure(const SaveJob& job, const std::string& reason) noexcept {
  try {
    const os::Path draft = work_of(job) / mark_name(job.rank, "failing");
    os::files().write(draft, reason);
    os::files().rename(draft, work_of(job) / mark_name(job.rank, "failed"));
  } catch (const std::exception& second) {
    log(LogLevel::info, cat("the other ranks cannot be told through the folder: ", second.what()));
  }
}

/// Of step 3.
void read_back(const SaveJob& job, const Manifest& written, const std::stop_token& stop) try {
  std::string bytes;
  for (const DataFile& file : written.files) {
    const BlockReader reader(work_of(job), file, job.block_bytes);
    reader.forget_cached();
    for (uint64_t block = 0; block < reader.blocks(); ++block) {
      if (stop.stop_requested()) throw Cancelled("write_part", cat("step ", job.step, " was given up"));
      bytes.resize(reader.end(block) - reader.begin(block));
      const std::string wrong = reader.read(block, bytes);
      if (wrong.empty()) continue;
      throw IoError("write_part", cat(reader.path().native(), " is not what was written, at byte ", reader.begin(block),
                                      " of step ", job.step, ": ", wrong, "; its storage damages data"));
    }
  }
} catch (const Damaged& damaged) {
  throw IoError("write_part", cat("step ", job.step, " is not what was written: ", damaged.fault().text()));
}

/// Step 5.
void wait_for_parts(const SaveJob& job, const std::stop_token& stop) {
  const os::Path work = work_of(job);
  const os::Deadline deadline(job.deadline);
  std::chrono::milliseconds pause(1);
  while (true) {
    const std::vector<std::string> names = os::files().list(work);
    auto there = [&names](const std::string& name) { return std::ranges::binary_search(names, name); };
    std::vector<int> missing;
    for (int rank = 0; rank < job.ranks(); ++rank) {
      if (there(mark_name(rank, "failed"))) {
        throw IoError("commit", cat("rank ", rank, " failed: ", os::files().read(work / mark_name(rank, "failed"))));
      }
      if (!there(mark_name(rank, "done"))) missing.push_back(rank);
    }
    if (missing.empty()) return;
    if (stop.stop_requested()) throw Cancelled("commit", cat("step ", job.step, " was given up"));
    if (deadline.passed()) {
      throw IoError("commit", cat("step ", job.step, ": ", missing.size(), " ranks have not written their part within ",
                                  job.deadline.count() / 1000.0, " s, the first is rank ", missing.front(),
                                  "; do all ranks see ", job.folder.native(), "?"));
    }
    os::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(50));
  }
}

/// Step 6. `training`: nullptr: as rank 0's fragment has it.
void write_manifest(const SaveJob& job, const nlohmann::json* training) {
  const os::Path work = work_of(job);
  std::vector<Manifest> fragments;
  for (int rank = 0; rank < job.ranks(); ++rank) {
    const os::Path path = work / mark_name(rank, "done");
    fragments.push_back(parse_manifest(os::files().read(path), path.native(), Coverage::fragment));
  }
  if (training != nullptr) fragments.front().training = *training;
  const std::string text = to_text(join(std::move(fragments)));
  try {
    parse_manifest(text, manifest_name.data());
  } catch (const Damaged& refused) {
    throw InvalidArgument("commit", cat("no reader would take this: ", refused.fault().text()));
  }
  os::files().write_synced(work / manifest_name, text);
}

/// Step 8: the directory's name once it is committed.
os::Path free_name(const SaveJob& job, const std::vector<Committed>& committed) {
  int64_t version = -1;
  for (const Committed& other : committed) {
    if (other.step == job.step) version = std::max(version, other.version);
  }
  if (!committed.empty() && committed.back().step > job.step) {
    log(LogLevel::warning, cat("saved step ", job.step, " beside ", committed.back().path.native(),
                               ", which counts as the newest: remove what this run does not continue"));
  }
  return job.folder / (version < 0 ? cat("step-", job.step) : cat("step-", job.step, ".", version + 1));
}

/// Step 10.
void remove_old(const SaveJob& job, const os::Path& newest) {
  std::vector<Committed> old = list_checkpoints(job.folder);
  const auto own = std::ranges::find(old, newest, &Committed::path);
  old.erase(own, old.end());
  if (job.keep <= 0 || old.size() < static_cast<size_t>(job.keep)) return;
  old.resize(old.size() - static_cast<size_t>(job.keep) + 1);
  std::vector<os::Path> aside;
  for (const Committed& checkpoint : old) {
    aside.push_back(checkpoint.path.native() + "." + job.attempt + ".tmp");
    os::files().rename(checkpoint.path, aside.back());
  }
  os::files().sync_directory(job.folder);
  crash_point("old-set-aside", job.rank);
  for (const os::Path& path : aside) remove_directory(path, job.rank);
}

/// Steps 7 to 10.
os::Path publish(const SaveJob& job, const std::stop_token& stop) {
  const os::Path work = work_of(job);
  for (const std::string& name : os::files().list(work)) {
    if (name.ends_with(".done")) os::files().remove(work / name);  // 7
  }
  crash_point("marks-removed", job.rank);
  os::files().sync_directory(work);
  crash_point("directory-synced", job.rank);
  if (stop.stop_requested()) throw Cancelled("commit", cat("step ", job.step, " was given up"));
  if (job.fence) job.fence();
  const os::Path path = free_name(job, list_checkpoints(job.folder));                             // 8
  if (stop.stop_requested()) throw Cancelled("commit", cat("step ", job.step, " was given up"));  // while it hung
  os::files().rename(work, path);
  crash_point("renamed", job.rank);
  os::files().sync_directory(job.folder);  // 9
  crash_point("committed", job.rank);
  if (job.committed) job.committed();
  try {
    remove_old(job, path);  // 10
  } catch (const IoError& failure) {
    log(LogLevel::warning, cat("older checkpoints could not be removed: ", failure.what()));
  }
  crash_point("end", job.rank);
  return path;
}

/// What a file of WORK says; nothing: it is not there, or not whole.
std::optional<Manifest> read_manifest(const os::Path& path, Coverage coverage) {
  try {
    return parse_manifest(os::files().read(path), path.native(), coverage);
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool has_files_of(const os::Path& work, const Manifest& manifest) {
  return std::ranges::all_of(manifest.files, [&work](const DataFile& file) {
    const os::FileStatus status = os::files().status(work / file.name);
    return status.kind == os::FileKind::file && status.size == file.bytes;
  });
}

/// Whether every rank of the save has come to the end of step 4; then what it was goes to `job`.
bool is_written(SaveJob& job) {
  const os::Path work = work_of(job);
  const auto fragment = [&work](int rank) { return read_manifest(work / mark_name(rank, "done"), Coverage::fragment); };
  const std::optional<Manifest> first = fragment(0);
  if (!first || !has_files_of(work, *first)) return false;
  job.layout = first->layout;
  job.axes = first->axes;
  for (int rank = 1; rank < job.ranks(); ++rank) {
    const std::optional<Manifest> other = fragment(rank);
    if (!other || !has_files_of(work, *other)) return false;
  }
  return true;
}

}  // namespace

void write_part(const SaveJob& job, const std::vector<Source>& sources, const std::stop_token& stop,
                const nlohmann::json* training) {
  check(job);
  const os::Path work = work_of(job);
  crash_point("begin", job.rank);
  try {
    os::files().make_directories(job.folder);  // 1
    if (job.rank == 0) {
      if (job.fence) job.fence();
      remove_strays(job);
    }
    os::files().make_directory(work);
    crash_point("directory-made", job.rank);

    Manifest written = write_data_file(job, work, sources, stop);  // 2
    os::files().sync_directory(work);                              // 3
    if (job.read_back) read_back(job, written, stop);
    crash_point("data-synced", job.rank);

    if (training != nullptr) written.training = *training;
    const os::Path draft = work / mark_name(job.rank, "part");  // 4
    os::files().write_synced(draft, to_text(written));
    crash_point("part-written", job.rank);
    os::files().rename(draft, work / mark_name(job.rank, "done"));
  } catch (const std::exception& failure) {
    leave_failure(job, failure.what());
    throw;
  }
  crash_point("done", job.rank);
}

os::Path commit(const SaveJob& job, const nlohmann::json& training, const std::stop_token& stop) {
  wait_for_parts(job, stop);  // 5
  crash_point("all-done", job.rank);
  write_manifest(job, &training);  // 6
  crash_point("manifest-written", job.rank);
  return publish(job, stop);
}

std::optional<os::Path> commit_left_behind(const os::Path& folder, int keep) {
  const std::vector<Committed> committed = list_checkpoints(folder);
  const int64_t newest = committed.empty() ? -1 : committed.back().step;
  std::map<int64_t, SaveJob, std::greater<>> left;
  if (os::files().exists(folder)) {
    for (const std::string& name : os::files().list(folder)) {
      const std::optional<Stray> stray = parse_stray(name);
      if (!stray || stray->step <= newest) continue;  // older ones are on their way out
      left.insert_or_assign(stray->step,
                            SaveJob{.folder = folder, .step = stray->step, .attempt = stray->attempt, .keep = keep});
    }
  }
  for (auto& [step, job] : left) {
    const os::Path work = work_of(job);
    const std::optional<Manifest> manifest = read_manifest(work / manifest_name, Coverage::checkpoint);
    if (manifest && has_files_of(work, *manifest)) return publish(job, {});
    if (!is_written(job)) continue;
    write_manifest(job, nullptr);
    return publish(job, {});
  }
  return std::nullopt;
}

void discard(const SaveJob& job) noexcept {
  try {
    os::files().remove_all(work_of(job));
  } catch (const std::exception& failure) {
    log(LogLevel::info, cat("the next save removes ", work_of(job).native(), ": ", failure.what()));
  }
}

}  // namespace tesserae::checkpoint
