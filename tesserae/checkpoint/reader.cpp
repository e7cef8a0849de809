#include "tesserae/checkpoint/reader.h"

#include <algorithm>
#include <utility>

#include "tesserae/base/copy.h"
#include "tesserae/checkpoint/block_reader.h"
#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/manifest_text.h"

namespace tesserae::checkpoint {
namespace {

/// A run of bytes of one data file that someone wants.
struct WantedRun {
  int file;
  uint64_t begin, end;
  int64_t first;  ///< element at `begin`
  int64_t width;  ///< bytes of an element
  const Wanted* wanted;

  char* destination() const {
    if (wanted->destination == nullptr) return nullptr;
    return wanted->destination + (first - wanted->elements.begin) * width;
  }
};

void add_runs(const Manifest& manifest, const Wanted& wanted, std::vector<WantedRun>& runs) {
  const StoredTensor* tensor = manifest.find(wanted.tensor);
  if (tensor == nullptr) {
    throw InvalidArgument("Checkpoint::read", cat("step ", manifest.step, " has no tensor \"", wanted.tensor, "\""));
  }
  const auto [begin, end] = wanted.elements;
  if (begin < 0 || begin > end || end > tensor->elements()) {
    throw InvalidArgument("Checkpoint::read", cat("elements [", begin, ", ", end, ") of tensor \"", wanted.tensor,
                                                  "\", which has ", tensor->elements()));
  }
  const int64_t width = element_bytes(tensor->dtype);
  const auto is_before = [begin = begin](const Extent& extent) { return extent.elements.end <= begin; };
  for (auto it = std::ranges::partition_point(tensor->extents, is_before); it != tensor->extents.end(); ++it) {
    const Extent& extent = *it;
    const int64_t first = std::max(begin, extent.elements.begin);
    const int64_t last = std::min(end, extent.elements.end);
    if (first >= last) break;
    const uint64_t offset = extent.offset + static_cast<uint64_t>((first - extent.elements.begin) * width);
    runs.push_back(
        {extent.file, offset, offset + static_cast<uint64_t>((last - first) * width), first, width, &wanted});
  }
}

/// Gives the run its share of a verified block.
void hand_out(const WantedRun& run, uint64_t block_begin, std::string_view block) {
  const uint64_t begin = std::max(run.begin, block_begin);
  const uint64_t end = std::min(run.end, block_begin + block.size());
  const std::string_view share = block.substr(begin - block_begin, end - begin);
  if (char* destination = run.destination()) {
    copy_memory(destination + (begin - run.begin), share.data(), share.size());
  } else if (run.wanted->take) {
    run.wanted->take(run.first + static_cast<int64_t>(begin - run.begin) / run.width, share);
  }
}

void read_block(const BlockReader& file, uint64_t block, std::span<char> bytes, std::string_view tensor) {
  if (const std::string wrong = file.read(block, bytes); !wrong.empty()) {
    throw Damaged("Checkpoint::read", {file.path().native(), std::string(tensor), file.begin(block), wrong});
  }
}

/// Reads the blocks that the runs of one file touch, each once. A block that one run wants whole goes straight to its
/// place. `runs` are sorted by begin. First come the blocks of the header, up to `data_begin`.
void read_file(const BlockReader& file, uint64_t block_bytes, uint64_t data_begin, std::span<const WantedRun> runs,
               std::string& buffer) {
  uint64_t block = 0;
  buffer.resize(block_bytes);
  for (; file.begin(block) < data_begin && file.end(block) <= runs.front().begin; ++block) {
    read_block(file, block, {buffer.data(), file.end(block) - file.begin(block)}, "");
  }
  std::vector<const WantedRun*> active;  // those that reach into the block at hand
  size_t next = 0;
  while (next < runs.size() || !active.empty()) {
    if (active.empty()) block = std::max(block, runs[next].begin / block_bytes);
    const uint64_t begin = file.begin(block);
    const uint64_t end = file.end(block);
    while (next < runs.size() && runs[next].begin < end) active.push_back(&runs[next++]);

    const WantedRun& first = *active.front();
    char* direct = active.size() == 1 && first.begin <= begin && first.end >= end ? first.destination() : nullptr;
    if (direct != nullptr) direct += begin - first.begin;
    const std::span<char> bytes(direct != nullptr ? direct : buffer.data(), end - begin);
    read_block(file, block, bytes, first.wanted->tensor);
    if (direct == nullptr) {
      for (const WantedRun* run : active) hand_out(*run, begin, {bytes.data(), bytes.size()});
    }
    std::erase_if(active, [end](const WantedRun* run) { return run->end <= end; });
    ++block;
  }
}

}  // namespace

Checkpoint::Checkpoint(os::Path path, Manifest manifest) : path_(std::move(path)), manifest_(std::move(manifest)) {
  for (const DataFile& file : manifest_.files) data_begin_.push_back(file.bytes);
  for (const StoredTensor& tensor : manifest_.tensors) {
    for (const Extent& extent : tensor.extents) {
      uint64_t& begin = data_begin_[static_cast<size_t>(extent.file)];
      begin = std::min(begin, extent.offset);
    }
  }
}

Checkpoint Checkpoint::open(const os::Path& path) {
  const os::FileStatus status = os::files().status(path);
  if (status.kind != os::FileKind::directory) {
    throw InvalidArgument("Checkpoint::open", cat(path.native(), " is no directory; a checkpoint is one"));
  }
  const os::Path file = path / manifest_name;
  const os::FileStatus manifest = os::files().status(file);
  auto refuse = [&file](const std::string& what) { throw Damaged("Checkpoint::open", {file.native(), "", {}, what}); };
  if (manifest.kind != os::FileKind::file) refuse("the file is missing");
  if (manifest.size > ManifestLimits::text_bytes) refuse(cat("a manifest of ", manifest.size, " bytes"));
  return {path, parse_manifest(os::files().read(file), file.native())};
}

void Checkpoint::read(const std::vector<Wanted>& wanted) const {
  std::vector<WantedRun> runs;
  for (const Wanted& one : wanted) add_runs(manifest_, one, runs);
  std::ranges::sort(runs, {}, [](const WantedRun& run) { return std::pair(run.file, run.begin); });
  std::string buffer;
  for (auto begin = runs.begin(); begin != runs.end();) {
    const int index = begin->file;
    const auto end = std::find_if(begin, runs.end(), [index](const WantedRun& run) { return run.file != index; });
    const BlockReader file(path_, manifest_.files[static_cast<size_t>(index)], manifest_.block_bytes);
    read_file(file, manifest_.block_bytes, data_begin_[static_cast<size_t>(index)], {begin, end}, buffer);
    begin = end;
  }
}

std::string Checkpoint::read(std::string_view tensor) const {
  const StoredTensor* stored = manifest_.find(tensor);
  if (stored == nullptr) {
    throw InvalidArgument("Checkpoint::read", cat("step ", step(), " has no tensor \"", tensor, "\""));
  }
  std::string bytes(static_cast<size_t>(stored->elements() * element_bytes(stored->dtype)), '\0');
  read({{stored->name, {0, stored->elements()}, bytes.data()}});
  return bytes;
}

}  // namespace tesserae::checkpoint
