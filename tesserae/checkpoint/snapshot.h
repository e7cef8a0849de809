#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/checkpoint/writer.h"
#include "tesserae/offload/pinned_blocks.h"

namespace tesserae::checkpoint {

/// Copies of this rank's pieces in memory of the host, which is kept from save to save (pinned where the pieces are on
/// a device). Memory: the bytes that this rank writes.
///
///   snapshot.begin(pieces);   // on the training thread, which waits for no device: copies what forward changes
///   snapshot.copy();          // on any thread, before the next optimizer step: takes the memory, and copies
///   snapshot.sources();       // what the writer takes; valid until the next begin()
class Snapshot {
 public:
  /// Takes over the pieces that this rank writes. Device work queued so far on the current stream comes first.
  void begin(std::vector<Piece> pieces);
  /// Returns when all copies have been made. Lets go of the pieces' tensors. Throws c10::OutOfMemoryError.
  void copy();
  const std::vector<Source>& sources() const { return sources_; }
  int64_t bytes() const { return buffer_.defined() ? buffer_.numel() : pinned_.bytes(); }

 private:
  void take_memory();
  void copy_from_host(size_t index);
  void copy_from_device(size_t index);

  std::vector<Piece> pieces_;
  std::vector<Source> sources_;   // one for each piece
  std::vector<int64_t> offsets_;  // their places in the memory
  int64_t total_ = 0;             // bytes of it that are needed
  // One of them.
  at::Tensor buffer_;
  offload::PinnedBlocks pinned_;
  std::optional<c10::Device> device_;  // of the pieces, unless all are on the host
  std::optional<c10::Event> ready_;    // what computes them is done
};

/// The pieces that this rank writes, read from their live memory while they are written: for a save during which
/// nothing changes them. `pieces` outlive it; their values are final when it returns.
std::vector<Source> live_sources(const std::vector<Piece>& pieces);

}  // namespace tesserae::checkpoint
