#include "tesserae/checkpoint/manifest.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tesserae/base/checked.h"
#include "tesserae/checkpoint/names.h"

namespace tesserae::checkpoint {
namespace {

/// Bytes of a run in a data file, for the search for overlaps.
struct StoredRun {
  int file;
  uint64_t begin, end;
  const StoredTensor* tensor;
};

std::string defect_of_file(const DataFile& file, uint64_t block_bytes) {
  if (const std::string bad = file_name_defect(file.name); !bad.empty()) return cat("file \"", file.name, "\": ", bad);
  const uint64_t blocks = file.bytes / block_bytes + (file.bytes % block_bytes != 0);
  if (file.blocks.size() == blocks) return {};
  return cat("file \"", file.name, "\": ", file.blocks.size(), " checksums for ", blocks, " blocks");
}

/// Checks one tensor and adds its runs to `runs`.
std::string defect_of_tensor(const StoredTensor& tensor, const Manifest& manifest, Coverage coverage,
                             std::vector<StoredRun>& runs) {
  if (const std::string bad = tensor_name_defect(tensor.name); !bad.empty()) return bad;
  if (bits(tensor.dtype) % 8 != 0) return cat("type ", to_string(tensor.dtype), " cannot be cut in parts");
  if (tensor.shape.size() > ManifestLimits::dimensions) return cat(tensor.shape.size(), " dimensions");
  const int64_t width = element_bytes(tensor.dtype);
  int64_t elements = 1;
  for (const int64_t size : tensor.shape) {
    if (size < 0 || __builtin_mul_overflow(elements, size, &elements)) return "the shape overflows";
  }
  if (int64_t bytes = 0; __builtin_mul_overflow(elements, width, &bytes)) return "the shape overflows";

  try {
    if (mesh::stored_order(tensor.shape, tensor.split) != tensor.split) {
      return cat(to_string(tensor.split), ": that order has a simpler name");
    }
  } catch (const InvalidArgument& error) {
    return error.what();
  }

  int64_t expected = 0;
  for (const Extent& extent : tensor.extents) {
    const auto& [begin, end] = extent.elements;
    const std::string here = cat("part [", begin, ", ", end, ")");
    if (begin < 0 || begin >= end || end > elements) return cat(here, " of ", elements, " elements");
    if (begin < expected) return cat(here, " begins before ", expected, ", where the one before it ends");
    if (coverage == Coverage::checkpoint && begin > expected)
      return cat("elements [", expected, ", ", begin, ") are missing");
    if (extent.file < 0 || static_cast<size_t>(extent.file) >= manifest.files.size()) {
      return cat(here, " is in file ", extent.file, " of ", manifest.files.size());
    }
    const DataFile& file = manifest.files[static_cast<size_t>(extent.file)];
    const uint64_t bytes = static_cast<uint64_t>((end - begin) * width);
    if (extent.offset > file.bytes || bytes > file.bytes - extent.offset) {
      return cat(here, " at byte ", extent.offset, " ends beyond ", file.name, " of ", file.bytes, " bytes");
    }
    if (extent.offset % static_cast<uint64_t>(width) != 0)
      return cat(here, " at byte ", extent.offset, " is not aligned");
    runs.push_back({extent.file, extent.offset, extent.offset + bytes, &tensor});
    expected = end;
  }
  if (coverage == Coverage::checkpoint && expected != elements) {
    return cat("elements [", expected, ", ", elements, ") are missing");
  }
  return {};
}

}  // namespace

int64_t StoredTensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count = checked_mul(count, size);
  return count;
}

const StoredTensor* Manifest::find(std::string_view name) const {
  const auto found =
      std::ranges::lower_bound(tensors, name, {}, [](const StoredTensor& t) { return std::string_view(t.name); });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

int64_t version_of(const Manifest& manifest) {
  auto split = [](const StoredTensor& tensor) { return !tensor.split.whole(); };
  return manifest.axes != mesh::AxisDegrees{} || std::ranges::any_of(manifest.tensors, split) ? 2 : 1;
}

uint64_t Manifest::bytes() const {
  uint64_t sum = 0;
  for (const DataFile& file : files) sum += file.bytes;
  return sum;
}

mesh::Mesh Manifest::mesh() const {
  const int64_t ranks = int64_t{layout.ranks()} * axes.tensor;
  if (ranks > ManifestLimits::ranks) throw InvalidArgument("Manifest", cat(ranks, " ranks"));
  return mesh::Mesh(static_cast<int>(ranks), axes);
}

std::string defect(const Manifest& manifest, Coverage coverage) {
  const uint64_t block = manifest.block_bytes;
  if (!ManifestLimits::is_block(block)) {
    return cat("block_bytes ", block, " is no power of two from ", ManifestLimits::smallest_block, " to ",
               ManifestLimits::largest_block);
  }
  if (manifest.step < 0) return cat("step ", manifest.step);
  try {
    manifest.mesh();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  if (!manifest.training.is_object()) return "the training state is no object";
  std::vector<std::string_view> names;
  for (const DataFile& file : manifest.files) {
    if (std::string bad = defect_of_file(file, block); !bad.empty()) return bad;
    names.push_back(file.name);
  }
  std::ranges::sort(names);
  if (const auto twice = std::ranges::adjacent_find(names); twice != names.end()) {
    return cat("file \"", *twice, "\" occurs twice");
  }

  std::vector<StoredRun> runs;
  const StoredTensor* before = nullptr;
  for (const StoredTensor& tensor : manifest.tensors) {
    if (before != nullptr && before->name >= tensor.name) {
      return cat("tensor \"", tensor.name, "\" stands behind \"", before->name, "\": names are sorted and unique");
    }
    before = &tensor;
    if (const std::string bad = defect_of_tensor(tensor, manifest, coverage, runs); !bad.empty()) {
      return cat("tensor \"", tensor.name, "\": ", bad);
    }
  }
  std::ranges::sort(runs, {}, [](const StoredRun& run) { return std::pair(run.file, run.begin); });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].file != runs[i - 1].file || runs[i].begin >= runs[i - 1].end) continue;
    return cat("tensors \"", runs[i - 1].tensor->name, "\" and \"", runs[i].tensor->name, "\" overlap at byte ",
               runs[i].begin, " of ", manifest.files[static_cast<size_t>(runs[i].file)].name);
  }
  return {};
}

Manifest join(std::vector<Manifest> fragments) {
  if (fragments.empty()) throw InvalidArgument("join", "no rank wrote anything");
  Manifest whole = std::move(fragments.front());
  std::map<std::string, StoredTensor> tensors;
  auto add = [&tensors](std::vector<StoredTensor>& some, int first_file) {
    for (StoredTensor& tensor : some) {
      for (Extent& extent : tensor.extents) extent.file += first_file;
      const auto [found, fresh] = tensors.try_emplace(tensor.name);
      StoredTensor& joined = found->second;
      if (fresh) {
        joined = std::move(tensor);
        continue;
      }
      if (joined.dtype != tensor.dtype || joined.shape != tensor.shape || joined.split != tensor.split) {
        throw InvalidArgument("join", cat("ranks disagree about type, shape or split of tensor \"", tensor.name, "\""));
      }
      joined.extents.insert(joined.extents.end(), tensor.extents.begin(), tensor.extents.end());
    }
  };
  add(whole.tensors, 0);
  for (size_t i = 1; i < fragments.size(); ++i) {
    if (fragments[i].block_bytes != whole.block_bytes) {
      throw InvalidArgument("join", cat("ranks use blocks of ", whole.block_bytes, " and ", fragments[i].block_bytes));
    }
    add(fragments[i].tensors, static_cast<int>(whole.files.size()));
    for (DataFile& file : fragments[i].files) whole.files.push_back(std::move(file));
  }
  whole.tensors.clear();
  for (auto& [name, tensor] : tensors) {
    std::ranges::sort(tensor.extents, {}, [](const Extent& extent) { return extent.elements.begin; });
    whole.tensors.push_back(std::move(tensor));
  }
  if (const std::string bad = defect(whole, Coverage::checkpoint); !bad.empty()) throw InvalidArgument("join", bad);
  return whole;
}

}  // namespace tesserae::checkpoint
