#include "tesserae/checkpoint/verify.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tesserae/checkpoint/block_reader.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/safetensors.h"

namespace tesserae::checkpoint {
namespace {

/// The parts of one data file by their place in it.
struct Placed {
  uint64_t begin, end;
  const StoredTensor* tensor;
  const Extent* extent;
};

std::vector<std::vector<Placed>> place_parts(const Manifest& manifest) {
  std::vector<std::vector<Placed>> placed(manifest.files.size());
  for (const StoredTensor& tensor : manifest.tensors) {
    for (const Extent& extent : tensor.extents) {
      const uint64_t bytes = static_cast<uint64_t>(extent.elements.size() * element_bytes(tensor.dtype));
      placed[static_cast<size_t>(extent.file)].push_back({extent.offset, extent.offset + bytes, &tensor, &extent});
    }
  }
  for (auto& parts : placed) std::ranges::sort(parts, {}, &Placed::begin);
  return placed;
}

std::string first_tensor_in(const std::vector<Placed>& parts, uint64_t begin, uint64_t end) {
  const auto found = std::ranges::upper_bound(parts, begin, {}, &Placed::end);
  return found != parts.end() && found->begin < end ? found->tensor->name : "";
}

/// Every tensor of the file's own header is a part that the manifest has there, and the other way round.
void compare_header(const os::Path& path, const DataFile& facts, const std::vector<Placed>& parts,
                    std::vector<Fault>& faults) {
  const auto file = os::files().open(path);
  const SafetensorsHeader header = read_safetensors_header(*file, facts.bytes, path.native());
  size_t next = 0;
  for (const FileTensor& tensor : header.tensors) {
    if (tensor.begin == tensor.end) continue;
    const uint64_t begin = header.data_begin + tensor.begin;
    if (next == parts.size() || parts[next].begin != begin || parts[next].end != header.data_begin + tensor.end ||
        parts[next].tensor->dtype != tensor.dtype) {
      faults.push_back({path.native(), tensor.name, begin, "the manifest has no such part there"});
      return;
    }
    ++next;
  }
  if (next != parts.size()) {
    faults.push_back(
        {path.native(), parts[next].tensor->name, parts[next].begin, "the file's header has no such tensor"});
  }
}

class Verifier {
 public:
  Verifier(const os::Path& path, const std::function<void(uint64_t)>& progress) : path_(path), progress_(progress) {}

  VerifyResult run() {
    try {
      const Checkpoint checkpoint = Checkpoint::open(path_);
      const Manifest& manifest = checkpoint.manifest();
      result_.files = 1;
      const auto placed = place_parts(manifest);
      for (size_t i = 0; i < manifest.files.size(); ++i) check(manifest.files[i], manifest.block_bytes, placed[i]);
      find_unknown(manifest);
    } catch (const Damaged& damaged) {
      result_.faults.push_back(damaged.fault());
    }
    return std::move(result_);
  }

 private:
  void check(const DataFile& facts, uint64_t block_bytes, const std::vector<Placed>& parts) {
    try {
      const BlockReader file(path_, facts, block_bytes);
      ++result_.files;
      if (check_blocks(file, parts)) compare_header(file.path(), facts, parts, result_.faults);
    } catch (const Damaged& damaged) {
      result_.faults.push_back(damaged.fault());
    }
  }

  bool check_blocks(const BlockReader& file, const std::vector<Placed>& parts) {
    bool good = true;
    bool after_bad = false;  // the block before was bad too: one fault for both
    for (uint64_t block = 0; block < file.blocks(); ++block) {
      const uint64_t begin = file.begin(block);
      const uint64_t end = file.end(block);
      buffer_.resize(end - begin);
      const std::string wrong = file.read(block, buffer_);
      if (!wrong.empty() && !after_bad) {
        result_.faults.push_back({file.path().native(), first_tensor_in(parts, begin, end), begin, wrong});
      }
      after_bad = !wrong.empty();
      good = good && !after_bad;
      result_.bytes += end - begin;
      if (progress_) progress_(result_.bytes);
    }
    return good;
  }

  void find_unknown(const Manifest& manifest) {
    std::set<std::string> known;
    for (const DataFile& file : manifest.files) known.insert(file.name);
    for (const std::string& name : os::files().list(path_)) {
      if (!name.ends_with(".safetensors") || known.contains(name)) continue;
      result_.faults.push_back({(path_ / name).native(), "", {}, "a data file that the manifest does not name"});
    }
  }

  const os::Path& path_;
  const std::function<void(uint64_t)>& progress_;
  VerifyResult result_;
  std::string buffer_;
};

}  // namespace

VerifyResult verify(const os::Path& checkpoint, const std::function<void(uint64_t bytes)>& progress) {
  return Verifier(checkpoint, progress).run();
}

}  // namespace tesserae::checkpoint
