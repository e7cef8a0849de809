#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/checkpoint/dtype.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/mesh/mesh.h"
#include "tesserae/mesh/split.h"
#include "tesserae/mesh/transfer.h"

namespace tesserae::checkpoint {

/// A data file with the checksums of its blocks: consecutive runs of Manifest::block_bytes, the last one shorter.
struct DataFile {
  std::string name;  ///< in the checkpoint's directory
  uint64_t bytes = 0;
  std::vector<uint64_t> blocks;
};

/// A run of elements of one tensor in a data file. The manifest lists those of a tensor as its "parts".
struct Extent {
  int file = 0;          ///< index in Manifest::files
  mesh::Range elements;  ///< of the flattened tensor, in its stored order
  uint64_t offset = 0;   ///< byte of the file at which they begin; a multiple of the element's size
};

/// A tensor of the training state, cut in as many extents as it took.
struct StoredTensor {
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;
  std::vector<Extent> extents;  ///< ascending; in a checkpoint they cover every element exactly once
  mesh::Splits split = {};      ///< the order in which elements count, as mesh::stored_order names it; whole: row-major

  int64_t elements() const;  ///< InvalidArgument if the shape overflows
};

/// What a checkpoint contains. Also, with fewer extents, what one rank has written of it (writer.h).
struct Manifest {
  int64_t step = 0;
  std::string attempt;  ///< names the save that wrote it; every data file carries it too
  mesh::Layout layout{1, {}};
  mesh::AxisDegrees axes;  ///< of the job's mesh; `layout` is that of the ranks that shard state
  uint64_t block_bytes = 1 << 20;
  std::vector<DataFile> files;
  std::vector<StoredTensor> tensors;                   ///< sorted by name, names are unique
  nlohmann::json training = nlohmann::json::object();  ///< whatever the trainer needs besides tensors

  /// nullptr if there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  uint64_t bytes() const;   ///< of all data files
  mesh::Mesh mesh() const;  ///< of the job that saved. Throws InvalidArgument if there is no such one
};

/// Readers refuse larger versions. 2 is written only where something of it is used (tensors stored split,
/// axes besides data), so that programs which know 1 go on reading what they can.
inline constexpr int64_t format_version = 2;
int64_t version_of(const Manifest& manifest);

/// Limits that a writer keeps and a reader insists on.
struct ManifestLimits {
  static constexpr uint64_t text_bytes = uint64_t{1} << 30;
  static constexpr uint64_t smallest_block = 512;
  static constexpr uint64_t largest_block = 64 << 20;
  static constexpr bool is_block(uint64_t bytes) {
    return bytes >= smallest_block && bytes <= largest_block && (bytes & (bytes - 1)) == 0;
  }
  static constexpr size_t dimensions = 64;
  static constexpr int64_t ranks = 1 << 24;
};

enum class Coverage {
  checkpoint,  ///< every element of every tensor is somewhere
  fragment,    ///< what one rank wrote
};

/// Says what is wrong with a manifest whatever file it came from; empty: nothing. Checked: names, sizes, number of
/// block checksums, bounds and overlaps of extents and, for a whole checkpoint, that nothing is missing.
std::string defect(const Manifest& manifest, Coverage coverage);

/// Joins what the ranks wrote. `fragments[0]` gives step, layout and training state. Throws InvalidArgument naming the
/// tensor when ranks disagree about a tensor, write the same elements twice, or leave some out.
Manifest join(std::vector<Manifest> fragments);

}  // namespace tesserae::checkpoint
