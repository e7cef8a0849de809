#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/os/files.h"
#include "tesserae/snapshot/subject.h"

namespace tesserae::snapshot {

/// What a snapshot says of its pieces, beside their names and elements, under this key of Manifest::training: which of
/// them the first replica does not write into a checkpoint, and how they are split (`elements` are those of the part).
inline constexpr const char* memory_key = "memory";
nlohmann::json notes_of(const std::vector<checkpoint::Piece>& pieces);

/// Snapshots of a job that had other degrees, or another number of ranks: the state of each of its parts is in memory
/// of the hosts of this one, its own or that of a replica. Writes the newest complete set of a step after `after` as a
/// checkpoint in `folder`, from which a job of any layout can go on. surviving_snapshots.cpp opens with the protocol.
///
/// `prefix`: what names of snapshots begin with. Collective. Returns the step; nothing if there is no such set, or it
/// is of another model. The snapshots stay. Throws checkpoint::SaveFailed.
std::optional<int64_t> save_surviving_snapshots(const Subject& subject, const mesh::Layout& layout,
                                                const std::string& prefix, const os::Path& folder, int64_t after);

/// Takes the snapshots of ranks `from` and above on this rank's host away whose names begin so. Not collective: whoever
/// comes first.
void remove_surviving_snapshots(const std::string& prefix, int from = 0) noexcept;
/// Takes away what begins with `folder` but not with `run`: what runs left in memory whose folder of that path was
/// removed. Nobody goes on from that. Not collective.
void remove_orphans(const std::string& folder, const std::string& run) noexcept;

}  // namespace tesserae::snapshot
