#include "tesserae/checkpoint/data_file.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "tesserae/base/checksum.h"
#include "tesserae/checkpoint/crash_point.h"
#include "tesserae/checkpoint/safetensors.h"

namespace tesserae::checkpoint {
namespace {

/// Hands bytes on to a file and takes the checksum of each block of it on the way. Runs of whole blocks are not copied.
class BlockWriter {
 public:
  BlockWriter(os::WritableFile& file, uint64_t block_bytes, const SaveJob& job, const std::stop_token& stop)
      : file_(file), block_bytes_(block_bytes), job_(job), stop_(stop) {
    pending_.reserve(block_bytes);
  }

  void add(std::string_view bytes) {
    while (!bytes.empty()) {
      if (pending_.empty() && bytes.size() >= block_bytes_) {
        put(bytes.substr(0, block_bytes_));
        bytes.remove_prefix(block_bytes_);
        continue;
      }
      const std::string_view head = bytes.substr(0, room());
      pending_.append(head);
      bytes.remove_prefix(head.size());
      if (pending_.size() == block_bytes_) flush();
    }
  }

  void add(const Source& source) {
    if (source.data != nullptr) return add(std::string_view(source.data, source.bytes()));
    for (uint64_t offset = 0; offset < source.bytes();) {
      const size_t filled = pending_.size();
      const uint64_t count = std::min(room(), source.bytes() - offset);
      pending_.resize(filled + count);
      source.fill(offset, {pending_.data() + filled, count});
      offset += count;
      if (pending_.size() == block_bytes_) flush();
    }
  }

  void flush() {
    if (!pending_.empty()) put(pending_);
    pending_.clear();
  }

  std::vector<uint64_t> take_checksums() { return std::move(checksums_); }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t room() const { return block_bytes_ - pending_.size(); }

  void put(std::string_view block) {
    if (stop_.stop_requested()) throw Cancelled("write_data_file", cat("step ", job_.step, " was given up"));
    checksums_.push_back(checksum(block));
    file_.write(block);
    bytes_ += block.size();
    if (checksums_.size() == 1) crash_point("data-begun", job_.rank);
  }

  os::WritableFile& file_;
  uint64_t block_bytes_;
  const SaveJob& job_;
  const std::stop_token& stop_;
  std::string pending_;
  std::vector<uint64_t> checksums_;
  uint64_t bytes_ = 0;
};

FileTensor describe(const Source& source) {
  const StoredTensor whole{source.name, source.dtype, source.shape, {}, source.split};
  const auto [begin, end] = source.elements;
  const int64_t elements = whole.elements();
  if (begin < 0 || begin > end || end > elements || (source.data == nullptr && !source.fill && begin < end)) {
    throw InvalidArgument("write_data_file", cat("tensor \"", source.name, "\" has ", elements, " elements and [",
                                                 begin, ", ", end, ") are to be written"));
  }
  if (begin == 0 && end == elements && source.split.whole()) return {source.name, source.dtype, source.shape};
  return {cat(source.name, "[", begin, ":", end, "]"), source.dtype, {end - begin}};
}

void check_names(const std::vector<FileTensor>& tensors) {
  std::vector<std::string_view> names;
  for (const FileTensor& tensor : tensors) names.push_back(tensor.name);
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice != names.end()) throw InvalidArgument("write_data_file", cat("tensor \"", *twice, "\" is written twice"));
}

}  // namespace

Manifest write_data_file(const SaveJob& job, const os::Path& directory, const std::vector<Source>& sources,
                         const std::stop_token& stop) {
  Manifest written;
  written.step = job.step;
  written.attempt = job.attempt;
  written.layout = job.layout;
  written.axes = job.axes;
  written.block_bytes = job.block_bytes;
  if (sources.empty()) return written;

  // Wide elements first, so that all of them are aligned.
  std::vector<const Source*> order;
  for (const Source& source : sources) order.push_back(&source);
  std::ranges::stable_sort(order, std::greater<>(), [](const Source* source) { return element_bytes(source->dtype); });
  std::vector<FileTensor> tensors;
  for (const Source* source : order) tensors.push_back(describe(*source));
  check_names(tensors);
  const std::string header = compose_safetensors_header(
      tensors, {{"format", "pt"}, {"tesserae.attempt", job.attempt}, {"tesserae.step", cat(job.step)}});

  const std::string name = cat("rank-", job.rank, ".safetensors");
  const std::unique_ptr<os::WritableFile> file = os::files().create(directory / name);
  BlockWriter writer(*file, job.block_bytes, job, stop);
  writer.add(header);
  for (const Source* source : order) writer.add(*source);
  writer.flush();
  crash_point("data-written", job.rank);
  file->sync();
  file->close();

  written.files.push_back({name, writer.bytes(), writer.take_checksums()});
  std::map<std::string, StoredTensor> stored;
  for (size_t i = 0; i < order.size(); ++i) {
    const Source& source = *order[i];
    StoredTensor& tensor = stored[source.name];
    if (!tensor.name.empty() &&
        (tensor.dtype != source.dtype || tensor.shape != source.shape || tensor.split != source.split)) {
      throw InvalidArgument("write_data_file", cat("two types, shapes or splits for tensor \"", source.name, "\""));
    }
    tensor.name = source.name;
    tensor.dtype = source.dtype;
    tensor.shape = source.shape;
    tensor.split = source.split;
    if (!source.elements.empty()) tensor.extents.push_back({0, source.elements, header.size() + tensors[i].begin});
  }
  for (auto& [tensor_name, tensor] : stored) {
    std::ranges::sort(tensor.extents, {}, [](const Extent& extent) { return extent.elements.begin; });
    written.tensors.push_back(std::move(tensor));
  }
  return written;
}

}  // namespace tesserae::checkpoint
