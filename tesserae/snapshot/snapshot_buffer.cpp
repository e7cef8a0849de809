#include "tesserae/snapshot/snapshot_buffer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "tesserae/base/checked.h"
#include "tesserae/base/checksum.h"
#include "tesserae/base/copy.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/manifest_text.h"

// How a buffer changes, so that whoever reads it after the process was killed at any instruction sees a whole snapshot
// or none:
//  1. its mark is cleared;
//  2. data and text are written;
//  3. the header with the mark is written.
// The order is for tidiness: what makes it safe is that the text has checksums of the data and of itself.
namespace tesserae::snapshot {
namespace {

constexpr std::string_view mark = "TESSMEM1";
constexpr uint64_t alignment = 64;
constexpr uint64_t page = 4096;

struct Header {
  char mark[8];
  uint64_t text_bytes;
  uint64_t data_begin;
};

char* memory_of(const os::SharedMemory& memory) {
  return static_cast<char*>(memory.data());
}

bool has_mark(std::string_view bytes) {
  return bytes.size() >= sizeof(Header) && bytes.starts_with(mark);
}

}  // namespace

std::string_view MemorySnapshot::find(const checkpoint::Piece& piece) const {
  const checkpoint::StoredTensor* stored = manifest.find(piece.name);
  if (stored == nullptr || stored->shape != piece.shape || stored->extents.size() != 1) return {};
  const checkpoint::Extent& extent = stored->extents.front();
  if (extent.elements.begin != piece.elements.begin || extent.elements.end != piece.elements.end ||
      stored->dtype != checkpoint::dtype_of(piece.data.scalar_type())) {
    return {};
  }
  return data.substr(extent.offset,
                     static_cast<size_t>(extent.elements.size() * checkpoint::element_bytes(stored->dtype)));
}

std::optional<MemorySnapshot> parse_snapshot(std::string_view bytes, const std::string& name) {
  Header header{};
  if (!has_mark(bytes)) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.data_begin > bytes.size() || header.data_begin < sizeof(Header) ||
      header.text_bytes > header.data_begin - sizeof(Header)) {
    return std::nullopt;
  }
  try {
    MemorySnapshot snapshot{.manifest = checkpoint::parse_manifest(bytes.substr(sizeof(Header), header.text_bytes),
                                                                   name, checkpoint::Coverage::fragment),
                            .data = bytes.substr(header.data_begin)};
    if (snapshot.manifest.files.size() != 1 || snapshot.manifest.files[0].bytes > snapshot.data.size()) {
      return std::nullopt;
    }
    const checkpoint::DataFile& file = snapshot.manifest.files[0];
    snapshot.data = snapshot.data.substr(0, file.bytes);
    for (size_t block = 0; block < file.blocks.size(); ++block) {
      const uint64_t size = snapshot.manifest.block_bytes;
      if (checksum(snapshot.data.substr(block * size, size)) != file.blocks[block]) {
        log(LogLevel::warning, cat("the snapshot in memory ", name, " is damaged: block ", block));
        return std::nullopt;
      }
    }
    return snapshot;
  } catch (const Error& error) {
    log(LogLevel::warning, cat("the snapshot in memory ", name, " is not used: ", error.what()));
    return std::nullopt;
  }
}

std::optional<MemorySnapshot> SnapshotBuffer::read() {
  if (!memory_) {
    try {
      memory_.emplace(os::SharedMemory::open(name_));
    } catch (const IoError&) {
      return std::nullopt;  // the usual case: nobody left one
    }
  }
  return parse_snapshot(bytes(), name_);
}

std::string_view SnapshotBuffer::bytes() const {
  return memory_ ? std::string_view(memory_of(*memory_), memory_->size()) : std::string_view();
}

void SnapshotBuffer::prepare(checkpoint::Manifest manifest, std::vector<checkpoint::Piece> pieces) {
  manifest_ = std::move(manifest);
  pieces_ = std::move(pieces);
  offsets_.clear();
  std::erase_if(pieces_, [](const checkpoint::Piece& piece) { return piece.elements.empty(); });
  std::map<std::string, checkpoint::StoredTensor> tensors;
  uint64_t end = 0;
  for (const checkpoint::Piece& piece : pieces_) {
    const checkpoint::Dtype dtype = checkpoint::dtype_of(piece.data.scalar_type());
    offsets_.push_back(end);
    tensors[piece.name] = {piece.name, dtype, piece.shape, {{0, piece.elements, end}}};
    end += static_cast<uint64_t>(piece.elements.size() * checkpoint::element_bytes(dtype));
    end = static_cast<uint64_t>(round_up(static_cast<int64_t>(end), alignment));
  }
  for (auto& [name, tensor] : tensors) manifest_.tensors.push_back(std::move(tensor));
  const uint64_t blocks = (end + manifest_.block_bytes - 1) / manifest_.block_bytes;
  manifest_.files = {{"memory", end, std::vector<uint64_t>(blocks, 0)}};

  // Checksums do not change the length of the text.
  const uint64_t text_bytes = checkpoint::to_text(manifest_).size();
  data_begin_ = static_cast<uint64_t>(round_up(static_cast<int64_t>(sizeof(Header) + text_bytes), page));
  if (!memory_ || memory_->size() < data_begin_ + end) {
    remove();
    // Room for a text that grows with the numbers in it.
    memory_.emplace(os::SharedMemory::create(name_, data_begin_ + page + end));
  }
  std::memset(memory_of(*memory_), 0, sizeof(Header));  // 1
}

void SnapshotBuffer::fill() {
  const at::NoGradGuard no_grad;
  char* const data = memory_of(*memory_) + data_begin_;
  checkpoint::DataFile& file = manifest_.files[0];
  for (size_t i = 0; i < pieces_.size(); ++i) {  // 2
    const at::Tensor& tensor = pieces_[i].data;
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (tensor.is_cpu()) {
      copy_memory(data + offsets_[i], tensor.const_data_ptr(), static_cast<size_t>(bytes));
    } else {
      at::from_blob(data + offsets_[i], {bytes}, at::kByte).copy_(tensor.detach().view({-1}).view(at::kByte));
    }
  }
  pieces_.clear();
  for (size_t block = 0; block < file.blocks.size(); ++block) {
    const uint64_t begin = block * manifest_.block_bytes;
    file.blocks[block] = checksum({data + begin, std::min(manifest_.block_bytes, file.bytes - begin)});
  }
  const std::string text = checkpoint::to_text(manifest_);
  copy_memory(memory_of(*memory_) + sizeof(Header), text.data(), text.size());
  Header header{.mark = {}, .text_bytes = text.size(), .data_begin = data_begin_};  // 3
  std::memcpy(header.mark, mark.data(), mark.size());
  std::memcpy(memory_of(*memory_), &header, sizeof(header));
}

void SnapshotBuffer::make_room(uint64_t bytes) {
  if (!memory_ || memory_->size() != bytes) {
    remove();
    memory_.emplace(os::SharedMemory::create(name_, bytes));
  }
  std::memset(memory_of(*memory_), 0, std::min<uint64_t>(bytes, sizeof(Header)));
}

void SnapshotBuffer::remove() {
  memory_.reset();
  os::SharedMemory::remove(name_);
}

void release(std::shared_ptr<SnapshotBuffer>& buffer) {
  os::SharedMemory::remove(buffer->name());
  buffer = std::make_shared<SnapshotBuffer>(buffer->name());
}

}  // namespace tesserae::snapshot
