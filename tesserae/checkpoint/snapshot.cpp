#include "tesserae/checkpoint/snapshot.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tesserae/base/checked.h"
#include "tesserae/offload/paged_tensor.h"

namespace tesserae::checkpoint {
namespace {

constexpr int64_t alignment = 64;

bool written(const Piece& piece) {
  return piece.written && piece.data.defined();
}

Source describe(const Piece& piece) {
  if (!piece.data.is_contiguous() || piece.data.numel() != piece.elements.size()) {
    throw InvalidArgument("Saver::save", cat("piece of \"", piece.name, "\" is not contiguous or has ",
                                             piece.data.numel(), " elements instead of ", piece.elements.size()));
  }
  // A part lies in the stored order as it lies in memory, without its padding, which comes last.
  const int64_t begin = mesh::part_begin(piece.shape, piece.split);
  const int64_t end = mesh::part_elements(piece.shape, piece.split);
  return {.name = piece.name,
          .dtype = dtype_of(piece.data.scalar_type()),
          .shape = piece.shape,
          .elements = {begin + std::min(piece.elements.begin, end), begin + std::min(piece.elements.end, end)},
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

}  // namespace

void Snapshot::begin(std::vector<Piece> pieces) {
  const at::NoGradGuard no_grad;
  pieces_ = std::move(pieces);
  std::erase_if(pieces_, [](const Piece& piece) { return !written(piece); });
  sources_.clear();
  offsets_.clear();
  device_.reset();
  int64_t total = 0;
  std::shared_ptr<offload::Disk> disk;  // where there is no memory for the pieces, there is none for their copies
  for (const Piece& piece : pieces_) {
    sources_.push_back(describe(piece));
    offsets_.push_back(total);
    total = round_up(total + static_cast<int64_t>(sources_.back().bytes()), alignment);
    if (!piece.data.is_cpu()) device_ = piece.data.device();
    if (disk == nullptr) disk = offload::disk_of(piece.data);
  }
  if (!buffer_.defined() || buffer_.numel() < total || (device_ && !buffer_.is_pinned()) ||
      offload::disk_of(buffer_) != disk) {
    buffer_.reset();  // the old one is given back first
    buffer_ = disk != nullptr
                  ? offload::paged_tensor(disk, total, at::kByte)
                  : at::empty({total}, at::TensorOptions().dtype(at::kByte).pinned_memory(device_.has_value()));
  }
  for (size_t i = 0; i < pieces_.size(); ++i) {
    read_from(sources_[i], buffer_.narrow(0, offsets_[i], static_cast<int64_t>(sources_[i].bytes())));
  }

  if (device_) {
    ready_.emplace(device_->type());
    ready_->record(c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_));
  }
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].changes_in_forward) copy_piece(i, /*wait=*/true);
  }
}

void Snapshot::copy() {
  const at::NoGradGuard no_grad;
  auto copy_all = [this] {
    for (size_t i = 0; i < pieces_.size(); ++i) copy_piece(i, /*wait=*/false);
  };
  if (device_) {
    // A stream of its own, so that the copies run beside the computation that is queued meanwhile.
    const c10::impl::VirtualGuardImpl guard(device_->type());
    const c10::Stream stream = guard.getStreamFromGlobalPool(*device_, /*isHighPriority=*/false);
    const c10::StreamGuard on_stream(stream);
    ready_->block(stream);
    copy_all();
    guard.synchronizeStream(stream);
  } else {
    copy_all();
  }
  pieces_.clear();
}

void Snapshot::copy_piece(size_t index, bool wait) {
  Piece& piece = pieces_[index];
  if (!piece.data.defined() || piece.data.numel() == 0) return;
  const auto count = static_cast<int64_t>(sources_[index].bytes());
  const at::Tensor to = buffer_.narrow(0, offsets_[index], count);
  const at::Tensor from = flat_bytes(piece.data).narrow(0, 0, count);
  if (piece.data.is_cpu()) {
    // Not copy_(): that would spread over threads which the forward needs.
    offload::in_runs(
        {{to, offload::Access::fill}, {from, offload::Access::read}}, count, [&](int64_t begin, int64_t end) {
          std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + begin,
                      static_cast<const char*>(from.const_data_ptr()) + begin, static_cast<size_t>(end - begin));
        });
  } else {
    at::Tensor(to).copy_(from, /*non_blocking=*/!wait);
  }
  if (wait) piece.data.reset();
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
