#include "tesserae/checkpoint/snapshot.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "tesserae/base/checked.h"
#include "tesserae/base/copy.h"
#include "tesserae/offload/paged_tensor.h"

namespace tesserae::checkpoint {
namespace {

constexpr int64_t alignment = 64;

bool written(const Piece& piece) {
  if (!piece.written || piece.data.defined()) return piece.written;
  if (piece.elements.size() == 0) return false;
  throw InvalidArgument("Saver::save",
                        cat("piece of \"", piece.name, "\" has no tensor of its ", piece.elements.size(), " elements"));
}

Source describe(const Piece& piece) {
  if (!piece.data.is_contiguous() || piece.data.numel() != piece.elements.size()) {
    throw InvalidArgument("Saver::save", cat("piece of \"", piece.name, "\" is not contiguous or has ",
                                             piece.data.numel(), " elements instead of ", piece.elements.size()));
  }
  return {.name = piece.name,
          .dtype = dtype_of(piece.data.scalar_type()),
          .shape = piece.shape,
          .elements = stored_elements(piece),
          .split = mesh::stored_order(piece.shape, piece.split)};
}

at::Tensor flat_bytes(const at::Tensor& tensor) {
  return tensor.detach().view({-1}).view(at::kByte);
}

// What is written of `source` is there, block by block where it cannot be read at its address.
void read_from(Source& source, const at::Tensor& bytes) {
  if (bytes.is_cpu() && !offload::is_paged(bytes)) {
    source.data = static_cast<const char*>(bytes.const_data_ptr());
    return;
  }
  source.fill = [bytes](uint64_t offset, std::span<char> target) {
    const auto begin = static_cast<int64_t>(offset), count = static_cast<int64_t>(target.size());
    offload::prefetch(bytes.slice(0, begin + count, begin + count + static_cast<int64_t>(offload::PagedMemory::block)));
    offload::copy(at::from_blob(target.data(), {count}, at::kByte), bytes.narrow(0, begin, count));
  };
}

// The same of pinned memory, at its address where it lies in one block.
void read_from(Source& source, const offload::PinnedBlocks& blocks, int64_t offset) {
  const auto bytes = static_cast<int64_t>(source.bytes());
  blocks.visit(offset, bytes, [&](int64_t, const at::Tensor& run) {
    if (run.numel() == bytes) source.data = static_cast<const char*>(run.const_data_ptr());
  });
  if (source.data != nullptr) return;
  source.fill = [&blocks, offset](uint64_t from, std::span<char> target) {
    blocks.visit(offset + static_cast<int64_t>(from), static_cast<int64_t>(target.size()),
                 [&](int64_t begin, const at::Tensor& run) {
                   copy_memory(target.data() + begin, run.const_data_ptr(), static_cast<size_t>(run.numel()));
                 });
  };
}

}  // namespace

void Snapshot::begin(std::vector<Piece> pieces) {
  const at::NoGradGuard no_grad;
  pieces_ = std::move(pieces);
  std::erase_if(pieces_, [](const Piece& piece) { return !written(piece); });
  sources_.clear();
  offsets_.clear();
  device_.reset();
  total_ = 0;
  for (Piece& piece : pieces_) {
    sources_.push_back(describe(piece));
    offsets_.push_back(total_);
    total_ = round_up(total_ + static_cast<int64_t>(sources_.back().bytes()), alignment);
    if (!piece.data.is_cpu()) device_ = piece.data.device();
    if (!piece.changes_in_forward) continue;
    const at::Tensor now = at::empty_like(piece.data);
    offload::copy(now.view({-1}), piece.data.view({-1}));
    piece.data = now;
  }
  if (device_) {
    ready_.emplace(device_->type());
    ready_->record(c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_));
  }
}

void Snapshot::copy() {
  const at::NoGradGuard no_grad;
  if (!device_) {
    take_memory();
    for (size_t i = 0; i < pieces_.size(); ++i) copy_from_host(i);
  } else {
    // A stream of its own, so that the copies run beside the computation that is queued meanwhile.
    const c10::impl::VirtualGuardImpl guard(device_->type());
    const c10::Stream stream = guard.getStreamFromGlobalPool(*device_, /*isHighPriority=*/false);
    const c10::StreamGuard on_stream(stream);
    take_memory();
    ready_->block(stream);
    for (size_t i = 0; i < pieces_.size(); ++i) pieces_[i].data.is_cpu() ? copy_from_host(i) : copy_from_device(i);
    guard.synchronizeStream(stream);
  }
  pieces_.clear();
}

// Not in begin(): to pin memory takes about as long as to copy to it. What is there is kept, if it is enough.
void Snapshot::take_memory() {
  std::shared_ptr<offload::Disk> disk;  // where there is no memory for the pieces, there is none for their copies
  for (const Piece& piece : pieces_) {
    if (disk == nullptr) disk = offload::disk_of(piece.data);
  }
  const bool pins = device_ && disk == nullptr;
  if (pins ? pinned_.bytes() < total_
           : !buffer_.defined() || buffer_.numel() < total_ || offload::disk_of(buffer_) != disk) {
    buffer_.reset();  // the old one is given back first
    pinned_ = {};
    if (pins) {
      pinned_ = offload::PinnedBlocks(total_);
    } else {
      buffer_ = disk != nullptr ? offload::paged_tensor(disk, total_, at::kByte)
                                : at::empty({total_}, at::TensorOptions().dtype(at::kByte));
    }
  }
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto count = static_cast<int64_t>(sources_[i].bytes());
    if (pins) {
      read_from(sources_[i], pinned_, offsets_[i]);
    } else {
      read_from(sources_[i], buffer_.narrow(0, offsets_[i], count));
    }
  }
}

void Snapshot::copy_from_host(size_t index) {
  const auto count = static_cast<int64_t>(sources_[index].bytes());
  if (count == 0) return;
  const at::Tensor from = flat_bytes(pieces_[index].data).narrow(0, 0, count);
  // Not copy_(): that would spread over threads which the forward needs.
  const auto copy_run = [&](const at::Tensor& to, int64_t offset) {
    copy_memory(to.mutable_data_ptr(), static_cast<const char*>(from.const_data_ptr()) + offset, to.nbytes());
  };
  if (!buffer_.defined()) {
    pinned_.visit(offsets_[index], count, [&](int64_t offset, const at::Tensor& to) { copy_run(to, offset); });
    return;
  }
  const at::Tensor to = buffer_.narrow(0, offsets_[index], count);
  offload::in_runs({{to, offload::Access::fill}, {from, offload::Access::read}}, count,
                   [&](int64_t begin, int64_t end) { copy_run(to.slice(0, begin, end), begin); });
}

void Snapshot::copy_from_device(size_t index) {
  const auto count = static_cast<int64_t>(sources_[index].bytes());
  if (count == 0) return;
  const at::Tensor from = flat_bytes(pieces_[index].data).narrow(0, 0, count);
  if (buffer_.defined()) {  // on a disk: what is not pinned is there when the call returns
    offload::copy(buffer_.narrow(0, offsets_[index], count), from);
    return;
  }
  pinned_.visit(offsets_[index], count, [&](int64_t offset, const at::Tensor& to) {
    at::Tensor(to).copy_(from.narrow(0, offset, to.numel()), /*non_blocking=*/true);
  });
}

std::vector<Source> live_sources(const std::vector<Piece>& pieces) {
  std::vector<Source> sources;
  std::optional<c10::Device> device;
  for (const Piece& piece : pieces) {
    if (!written(piece)) continue;
    Source source = describe(piece);
    if (!piece.data.is_cpu()) device = piece.data.device();
    read_from(source, flat_bytes(piece.data));
    sources.push_back(std::move(source));
  }
  if (device) {  // whoever reads does so on another stream
    const c10::impl::VirtualGuardImpl guard(device->type());
    guard.synchronizeStream(guard.getStream(*device));
  }
  return sources;
}

}  // namespace tesserae::checkpoint
