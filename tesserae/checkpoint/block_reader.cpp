#include "tesserae/checkpoint/block_reader.h"

#include <algorithm>

#include "tesserae/base/checksum.h"
#include "tesserae/checkpoint/fault.h"

namespace tesserae::checkpoint {

BlockReader::BlockReader(const os::Path& directory, const DataFile& file, uint64_t block_bytes)
    : path_(directory / file.name), facts_(file), block_bytes_(block_bytes) {
  const os::FileStatus status = os::files().status(path_);
  auto refuse = [this](std::optional<uint64_t> offset, const std::string& what) {
    throw Damaged("Checkpoint", {path_.native(), "", offset, what});
  };
  if (status.kind != os::FileKind::file) refuse({}, "the file is missing");
  if (status.size != file.bytes) {
    refuse(std::min(status.size, file.bytes),
           cat("the file has ", status.size, " bytes, the manifest says ", file.bytes));
  }
  file_ = os::files().open(path_);
}

uint64_t BlockReader::end(uint64_t block) const {
  return std::min(begin(block) + block_bytes_, facts_.bytes);
}

std::string BlockReader::read(uint64_t block, std::span<char> bytes) const {
  const size_t count = file_->read_at(begin(block), bytes);
  if (count != bytes.size()) return cat("the file ends at byte ", begin(block) + count);
  const uint64_t actual = checksum({bytes.data(), bytes.size()});
  const uint64_t expected = facts_.blocks[block];
  if (actual == expected) return {};
  return cat("block ", block, " has checksum ", to_hex(actual), ", the manifest says ", to_hex(expected));
}

}  // namespace tesserae::checkpoint
