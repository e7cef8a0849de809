#include "tesserae/snapshot/host_copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/comm/agree.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/seconds.h"
#include "tesserae/os/shared_memory.h"

// Each save, if all ranks are done with the one before (all_are_done; else there is no save: training waits for no
// copy):
//  1. every rank knows which of the others' buffers are sent, and how large they are, and makes room for those that it
//     keeps: in the slot that the other has written, so that the copy of the one before stays. Room that there is not
//     is known before anything is sent;
//  2. on a lane of its own, beside training: once its own buffer is sealed, a rank sends it to its keeper and receives
//     what it keeps, a piece at a time, so that a deadline is one of a piece. A copy is the bytes of the buffer: whole
//     once its checksums fit;
//  3. until all ranks are done with 2 nobody writes over the snapshot before: from the second save on there is a set at
//     any moment of which each part is on two hosts. A job that goes on sends its newest snapshot again before it makes
//     another one (MemoryTier::restore, keep_newest): the process that was lost may have had it half sent.
// Whoever goes on after a host was lost reads what is in memory of the hosts that are left, whichever rank it is of
// (surviving_snapshots.h).
namespace tesserae::snapshot {
namespace {

/// The ranks on which what `rank` sends or keeps depends, ascending: whoever sends to another, directly or by others.
std::vector<int> connected(const std::vector<int>& keepers, int rank) {
  std::set<int> found{rank};
  for (size_t before = 0; before != found.size();) {
    before = found.size();
    for (size_t ward = 0; ward < keepers.size(); ++ward) {
      if (keepers[ward] < 0) continue;
      if (found.contains(static_cast<int>(ward))) found.insert(keepers[ward]);
      if (found.contains(keepers[ward])) found.insert(static_cast<int>(ward));
    }
  }
  return {found.begin(), found.end()};
}

/// One side of a copy.
struct Side {
  int peer;  ///< member of the group
  std::shared_ptr<SnapshotBuffer> buffer;
  at::Tensor staged;  ///< a piece on the device; undefined where messages are of the host
};

/// The n-th piece of a buffer; undefined behind its end.
at::Tensor piece_of(const SnapshotBuffer& buffer, int64_t number) {
  const std::string_view bytes = buffer.bytes();
  const int64_t begin = number * message_bytes, left = static_cast<int64_t>(bytes.size()) - begin;
  if (left <= 0) return {};
  return at::from_blob(const_cast<char*>(bytes.data()) + begin, {std::min(left, message_bytes)}, at::kByte);
}

at::Tensor staging(const SnapshotBuffer& buffer, c10::Device device) {
  if (device.is_cpu()) return {};
  const auto size = std::min(static_cast<int64_t>(buffer.bytes().size()), message_bytes);
  return at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device));
}

/// What travels of a piece.
at::Tensor message_of(const Side& side, const at::Tensor& piece) {
  return side.staged.defined() ? side.staged.narrow(0, 0, piece.numel()) : piece;
}

}  // namespace

/// Owns all that it touches: after a loss nobody waits for it.
struct HostCopies::Transfer {
  comm::Group* group;
  std::vector<Side> out, in;
  std::shared_future<double> filled;
  Figures figures;

  /// Step 2. Buffers are of the host, messages of the group's device.
  void run() {
    if (filled.valid()) filled.wait();
    const os::TimePoint begin = os::now();
    for (int64_t number = 0; exchange(number); ++number) {
    }
    figures.seconds = os::seconds_since(begin);
    for (const Side& side : out) figures.bytes += side.buffer->bytes().size();
  }

  /// The n-th piece of all; false: there is none.
  bool exchange(int64_t number) {
    std::vector<comm::Message> sends, receives;
    std::vector<at::Tensor> places;
    for (const Side& side : out) {
      const at::Tensor piece = piece_of(*side.buffer, number);
      if (!piece.defined()) continue;
      sends.push_back({.peer = side.peer, .data = message_of(side, piece)});
      if (side.staged.defined()) sends.back().data.copy_(piece);
    }
    for (const Side& side : in) {
      const at::Tensor piece = piece_of(*side.buffer, number);
      if (!piece.defined()) continue;
      places.push_back(piece);
      receives.push_back({.peer = side.peer, .data = message_of(side, piece)});
    }
    if (sends.empty() && receives.empty()) return false;
    group->exchange(sends, receives, {"snapshots"});
    for (size_t i = 0; i < places.size(); ++i) {
      if (!receives[i].data.is_same(places[i])) places[i].copy_(group->to_host(receives[i].data));
    }
    return true;
  }
};

std::vector<int> keepers(const mesh::World& world, const mesh::Mesh& mesh, const mesh::Layout& layout) {
  std::vector<int> found(static_cast<size_t>(world.size()), -1);
  if (world.hosts() == 1) return found;
  std::vector<std::vector<int>> hosts;
  for (int rank = 0; rank < world.size(); rank = hosts.back().back() + 1) hosts.push_back(world.host_ranks(rank));
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto host = static_cast<size_t>(world.host(rank));
    const int other = neighbour(mesh, layout, rank);
    if (other >= 0 && world.host(other) != world.host(rank)) continue;
    const std::vector<int>& next = hosts[(host + 1) % hosts.size()];
    found[static_cast<size_t>(rank)] = next[static_cast<size_t>(rank - hosts[host].front()) % next.size()];
  }
  return found;
}

HostCopies::HostCopies(std::shared_ptr<comm::Fabric> job, std::string prefix)
    : job_(std::move(job)), prefix_(std::move(prefix)) {}

void HostCopies::use(const std::vector<int>& keepers) {
  if (given_up_) return;
  const int rank = job_->rank();
  any_ = std::ranges::any_of(keepers, [](int keeper) { return keeper >= 0; });
  keeper_ = keepers[static_cast<size_t>(rank)];
  saves_ = 0;
  wards_.clear();
  for (size_t ward = 0; ward < keepers.size(); ++ward) {
    if (keepers[ward] == rank) wards_.push_back(static_cast<int>(ward));
  }
  members_ = connected(keepers, rank);
  group_ = members_.size() > 1 ? &job_->group(members_, comm::Traffic::copies) : nullptr;
}

void HostCopies::give_up() noexcept {
  given_up_ = true;
  any_ = false;
  remove();
}

SnapshotBuffer& HostCopies::kept(int rank, size_t slot) {
  Buffers& buffers = kept_[rank];
  for (size_t next = buffers.size(); next < buffers_per_rank; ++next) {
    buffers.push_back(std::make_shared<SnapshotBuffer>(cat(prefix_, rank, "-", next, kept_suffix)));
  }
  return *buffers[slot];
}

bool HostCopies::all_are_done() {
  const bool done = sending_.ready();
  if (done) {
    sending_.wait();  // throws what it failed of
    if (const auto last = std::exchange(transfer_, nullptr)) {
      figures_.bytes += last->figures.bytes;
      figures_.seconds += last->figures.seconds;
    }
  }
  return comm::lowest_rank_with(*job_, !done) < 0;
}

void HostCopies::prepare(const std::vector<Sent>& sent) {
  const auto member = [this](int rank) {
    return static_cast<int>(std::ranges::find(members_, rank) - members_.begin());
  };
  transfer_ = std::make_shared<Transfer>(Transfer{.group = group_, .out = {}, .in = {}, .filled = {}, .figures = {}});
  for (const int ward : wards_) {
    const auto& [bytes, slot] = sent[static_cast<size_t>(ward)];
    if (bytes == 0) continue;
    SnapshotBuffer& buffer = kept(ward, slot);
    buffer.make_room(static_cast<uint64_t>(bytes));
    transfer_->in.push_back(
        {.peer = member(ward), .buffer = kept_[ward][slot], .staged = staging(buffer, job_->device())});
  }
  if (keeper_ >= 0) transfer_->out.push_back({.peer = member(keeper_), .buffer = nullptr, .staged = {}});
}

void HostCopies::begin(const std::shared_ptr<SnapshotBuffer>& own, std::shared_future<double> filled) {
  if (own == nullptr) transfer_->out.clear();
  for (Side& side : transfer_->out) {
    side.buffer = own;
    side.staged = staging(*own, job_->device());
  }
  if (group_ == nullptr) return;
  transfer_->filled = std::move(filled);
  sending_ = job_->lane(comm::Traffic::copies).submit([transfer = transfer_] { transfer->run(); });
}

void HostCopies::tidy() {
  if (++saves_ <= static_cast<int>(buffers_per_rank)) return;
  for (auto entry = kept_.begin(); entry != kept_.end();) {
    if (any_ && std::ranges::find(wards_, entry->first) != wards_.end()) {
      ++entry;
      continue;
    }
    for (auto& buffer : entry->second) release(buffer);
    entry = kept_.erase(entry);
  }
}

void HostCopies::remove() noexcept {
  kept_.clear();
  try {
    // Also what a process had that this one has taken the place of.
    for (const std::string& name : os::SharedMemory::names(prefix_)) {
      if (name.ends_with(kept_suffix)) os::SharedMemory::remove(name);
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, cat("a copy of another host's snapshot could not be taken away: ", error.what()));
  }
}

}  // namespace tesserae::snapshot
