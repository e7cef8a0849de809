#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/checkpoint/writer.h"

namespace tesserae::checkpoint {

/// Copies of this rank's pieces in one block of host memory, which is kept from save to save (pinned where the pieces
/// are on a device). Memory: the bytes that this rank writes.
///
///   snapshot.begin(pieces);   // on the training thread: copies what forward changes
///   snapshot.copy();          // on any thread, before the next optimizer step: copies the rest
///   snapshot.sources();       // what the writer takes; valid until the next begin()
class Snapshot {
 public:
  /// Takes over the pieces that this rank writes. Device work queued so far on the current stream comes first.
  void begin(std::vector<Piece> pieces);
  /// Returns when all copies have been made. Lets go of the pieces' tensors.
  void copy();
  const std::vector<Source>& sources() const { return sources_; }
  int64_t bytes() const { return buffer_.defined() ? buffer_.numel() : 0; }

 private:
  void copy_piece(size_t index, bool wait);

  std::vector<Piece> pieces_;
  std::vector<Source> sources_;   // one for each piece
  std::vector<int64_t> offsets_;  // their places in buffer_
  at::Tensor buffer_;
  std::optional<c10::Device> device_;  // of the pieces, unless all are on the host
  std::optional<c10::Event> ready_;    // what computes them is done
};

/// The pieces that this rank writes, read from their live memory while they are written: for a save during which
/// nothing changes them. `pieces` outlive it; their values are final when it returns.
std::vector<Source> live_sources(const std::vector<Piece>& pieces);

}  // namespace tesserae::checkpoint
