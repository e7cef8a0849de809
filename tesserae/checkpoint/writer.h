#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/checkpoint/dtype.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/mesh/mesh.h"
#include "tesserae/mesh/split.h"
#include "tesserae/mesh/transfer.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

/// One try at saving one step. The same on all ranks, but for `rank`.
struct SaveJob {
  os::Path folder;  ///< seen by all ranks; made if it is missing
  int64_t step = 0;
  std::string attempt;  ///< [a-z0-9-]+; never used before, by any job
  mesh::Layout layout{1, {}};
  mesh::AxisDegrees axes = {};  ///< of the job's mesh
  int rank = 0;                 ///< in [0, ranks())
  int keep = 0;                 ///< how many committed checkpoints up to this one stay; 0: all
  bool read_back = false;       ///< each rank reads from the medium what it wrote before it says that it is there
  uint64_t block_bytes = 1 << 20;
  std::chrono::milliseconds deadline = std::chrono::minutes(30);  ///< for the slowest rank to have written
  std::function<void()> fence = {};      ///< rank 0's, before it commits: throws FolderTaken if it is another job's
  std::function<void()> committed = {};  ///< rank 0's, once it has committed, before older ones are removed

  int ranks() const { return layout.ranks() * axes.tensor; }
};

/// Elements of a tensor that this rank writes, in host memory or made while they are written. Each element of a tensor
/// is written by one rank.
struct Source {
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;  ///< of the whole tensor
  mesh::Range elements;        ///< in the stored order, see `split`
  const char* data = nullptr;  ///< element `elements.begin` is here; nullptr: `fill` gives the bytes
  /// Fills `bytes` with those from `offset` on, counted from element `elements.begin`. Called in ascending order, for
  /// at most a block at a time.
  std::function<void(uint64_t offset, std::span<char> bytes)> fill = {};
  mesh::Splits split = {};  ///< StoredTensor::split; the same on all ranks

  uint64_t bytes() const { return static_cast<uint64_t>(elements.size() * element_bytes(dtype)); }
};

/// What a save was doing when it was stopped from outside.
class Cancelled : public Error {
 public:
  using Error::Error;
};

/// Writes this rank's part: steps 1 to 4 of the protocol in writer.cpp. Every rank of the job calls it, also one that
/// has nothing to write. Throws IoError (the folder then says so to rank 0), also if it is not read back as written,
/// InvalidArgument for sources that cannot be, Cancelled. `training`, of rank 0: what commit() will be given, for
/// commit_left_behind().
void write_part(const SaveJob& job, const std::vector<Source>& sources, const std::stop_token& stop = {},
                const nlohmann::json* training = nullptr);

/// Rank 0, after its own write_part: waits for the other ranks' parts and commits: steps 5 to 10. Returns the
/// checkpoint's directory. `training`: Manifest::training. When it throws, older checkpoints are as they were and
/// nothing was committed (only if the very last sync failed, a whole checkpoint is there that a power failure may take
/// back): IoError (also: a rank said that it failed, or the deadline passed), InvalidArgument (the parts do not fit
/// together), Cancelled. A failure after the commit, while older checkpoints are removed, is only logged.
os::Path commit(const SaveJob& job, const nlohmann::json& training, const std::stop_token& stop = {});

/// Commits the newest save in `folder` that nobody has committed, though all ranks have written their parts, if it is
/// of a later step than what is committed: its rank 0 is gone, or left when another rank was lost. One process calls
/// it, when no rank writes there any more. Returns the checkpoint's directory; nothing: there is no such save. Throws
/// what commit() throws.
std::optional<os::Path> commit_left_behind(const os::Path& folder, int keep);

/// Rank 0, when a save was given up and no rank writes any more: removes what it left, as far as that can be done.
void discard(const SaveJob& job) noexcept;

}  // namespace tesserae::checkpoint
