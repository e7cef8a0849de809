#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/checkpoint/name_map.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/safetensors.h"
#include "tesserae/checkpoint/state.h"

namespace tesserae::shard {
class Sharded;
}

namespace tesserae::checkpoint {

struct ExportOptions {
  std::optional<c10::ScalarType> dtype = {};  ///< of floating point tensors in the files; unset: as they are
  int64_t file_bytes = 5'000'000'000;         ///< several files and an index when the tensors are larger together
  NameMap names = {};                         ///< ours -> theirs
};

/// Writes the parameters and buffers of a checkpoint to `folder` as Hugging Face lays weights out: model.safetensors,
/// or model-00001-of-0000N.safetensors with model.safetensors.index.json. Streamed: memory is one block, of a
/// tensor that is stored split one for each of up to 64 parts. Files appear
/// under their names when complete, the index last. Throws Damaged, IoError, InvalidArgument (two tensors get one
/// name).
void export_weights(const Checkpoint& checkpoint, const os::Path& folder, const ExportOptions& options = {});

/// The same from a live model, in the dtype that it computes in unless told otherwise. Collective, also over the
/// tensor-parallel ranks, whose parts are joined; the first rank of the job writes. `buffers`: what else the files
/// have, by name, whole and alike on all ranks: those of the module. Memory beyond the model: one unit, and twice the
/// largest split tensor. A failure of rank 0 is thrown on all ranks.
void export_weights(shard::Sharded& sharded, const os::Path& folder, const ExportOptions& options = {},
                    const std::vector<std::pair<std::string, at::Tensor>>& buffers = {});

/// Weights in safetensors files: a file, an index, or a folder with model.safetensors or model.safetensors.index.json.
/// Opens each file once. Not thread-safe.
class WeightFiles {
 public:
  /// Throws Damaged for files that are not what the format says, IoError, InvalidArgument if there is nothing there.
  static WeightFiles open(const os::Path& path);
  ~WeightFiles();
  WeightFiles(WeightFiles&&) noexcept;

  /// All tensors by their names in the files; `begin` and `end` count in the tensor's file.
  const std::map<std::string, FileTensor>& tensors() const;
  /// Bytes [begin, end) of a tensor's data. There is no checksum: only that the file has them.
  void read(const std::string& name, uint64_t begin, std::span<char> bytes) const;

 private:
  struct Impl;
  explicit WeightFiles(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct ImportOptions {
  NameMap names = {};                      ///< ours -> theirs
  std::vector<std::string> may_miss = {};  ///< parameters that the files need not have (tied, freshly added)
  bool ignore_unknown = false;             ///< tensors of the files that the model does not have are no error
};

/// Fills the parameters of a live model and publishes them: each rank reads its own part from the files, converting
/// floating point types. Memory: one block. Collective; a failure on any rank is thrown on all. Throws InvalidArgument
/// naming a missing, unknown or misshapen tensor before anything is changed, Damaged, IoError.
void import_weights(const WeightFiles& files, shard::Sharded& sharded, const ImportOptions& options = {});

/// Makes a checkpoint of step 0 in `folder` that holds only parameters. Streamed; one process. Returns its directory.
os::Path checkpoint_from_weights(const WeightFiles& files, const os::Path& folder, const NameMap& names = {});

}  // namespace tesserae::checkpoint
