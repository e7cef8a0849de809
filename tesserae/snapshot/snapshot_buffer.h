#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/checkpoint/manifest.h"
#include "tesserae/checkpoint/state.h"
#include "tesserae/os/shared_memory.h"

namespace tesserae::snapshot {

/// The optimizer's counters of a shard are "counter/SHARD/NAME", beside those by parameter: a shard has one also where
/// no parameter begins.
inline constexpr std::string_view counter_prefix = "counter/";

/// What a buffer holds: the manifest of one rank's part of the training state, in the words of docs/format.md, and its
/// data. Valid while the bytes that it was read from are.
struct MemorySnapshot {
  checkpoint::Manifest manifest;
  std::string_view data;

  /// The elements that it has of a tensor; empty unless they are exactly these.
  std::string_view find(const checkpoint::Piece& piece) const;
};

/// The bytes of a buffer: "TESSMEM1", the length of the text (8 bytes, little-endian), where the data begin (the same),
/// the text, the data. Nothing unless they are whole and every checksum fits: a process that was killed while it wrote
/// leaves no snapshot.
std::optional<MemorySnapshot> parse_snapshot(std::string_view bytes, const std::string& name);

/// A place in shared memory of the host for one snapshot; it outlives the process. One process writes it, from one
/// thread.
class SnapshotBuffer {
 public:
  explicit SnapshotBuffer(std::string name) : name_(std::move(name)) {}

  /// What it holds, whoever wrote it. Reads every byte.
  std::optional<MemorySnapshot> read();
  /// All of its bytes, to be sent; empty if there are none.
  std::string_view bytes() const;

  /// Makes room for these pieces; from here on the buffer holds no snapshot until fill() has returned. `manifest` has
  /// everything but files and tensors. Throws IoError: the host has no room.
  void prepare(checkpoint::Manifest manifest, std::vector<checkpoint::Piece> pieces);
  /// Copies what was prepared and seals it with checksums. The pieces' memory must not change meanwhile; it is let go.
  void fill();

  /// Makes room for a snapshot of so many bytes that come from elsewhere; until they are there it holds none. Throws
  /// IoError: the host has no room.
  void make_room(uint64_t bytes);

  /// Gives the memory back.
  void remove();
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::optional<os::SharedMemory> memory_;
  checkpoint::Manifest manifest_;
  std::vector<checkpoint::Piece> pieces_;
  std::vector<uint64_t> offsets_;  // of pieces_, in the data
  uint64_t data_begin_ = 0;
};

/// Takes its memory away as soon as nobody uses it: who shares `buffer` keeps what it has, and `buffer` is another one
/// of its name.
void release(std::shared_ptr<SnapshotBuffer>& buffer);

}  // namespace tesserae::snapshot
