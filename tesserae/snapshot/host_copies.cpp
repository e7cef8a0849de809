#include "tesserae/snapshot/host_copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/seconds.h"

// Each save, after the one before has ended (end()):
//  1. every rank knows how large the others' buffers are, and makes room for those that it keeps: in the slot that the
//     other writes, so that the copy of the one before stays. Room that there is not is known before anything is sent;
//  2. on a lane of its own, beside training: once its own buffer is sealed, a rank sends it to its keeper and receives
//     what it keeps, a piece at a time, so that a deadline is one of a piece. A copy is the bytes of the buffer: whole
//     once its checksums fit;
//  3. before the next save all ranks have waited for 2, and know it of each other: until then nobody writes over the
//     snapshot before. So at any moment there is a set of which each part is on two hosts.
// Whoever goes on after a host was lost reads what is in memory of the hosts that are left, whichever rank it is of
// (surviving_snapshots.h).
namespace tesserae::snapshot {
namespace {

constexpr int64_t piece_bytes = int64_t{64} << 20;

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
};

/// The n-th piece of a buffer; not defined behind its end.
at::Tensor piece_of(const SnapshotBuffer& buffer, int64_t number) {
  const std::string_view bytes = buffer.bytes();
  const int64_t begin = number * piece_bytes, left = static_cast<int64_t>(bytes.size()) - begin;
  if (left <= 0) return {};
  return at::from_blob(const_cast<char*>(bytes.data()) + begin, {std::min(left, piece_bytes)}, at::kByte);
}

/// Step 2. Buffers on host, messages on the group's device.
void exchange(comm::Group& group, c10::Device device, const std::vector<Side>& out, const std::vector<Side>& in) {
  for (int64_t number = 0;; ++number) {
    std::vector<comm::Message> sends, receives;
    std::vector<at::Tensor> places;
    for (const Side& side : out) {
      const at::Tensor piece = piece_of(*side.buffer, number);
      if (piece.defined()) sends.push_back({.peer = side.peer, .data = piece.to(device)});
    }
    for (const Side& side : in) {
      const at::Tensor piece = piece_of(*side.buffer, number);
      if (!piece.defined()) continue;
      places.push_back(piece);
      receives.push_back({.peer = side.peer, .data = device.is_cpu() ? piece : at::empty_like(piece, device)});
    }
    if (sends.empty() && receives.empty()) return;
    group.exchange(sends, receives, {"snapshots"});
    if (device.is_cpu()) continue;
    for (size_t i = 0; i < places.size(); ++i) places[i].copy_(group.to_host(receives[i].data));
  }
}

}  // namespace

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
  any_ = false;
  keeper_ = -1;
  wards_.clear();
  group_ = nullptr;
  remove();
}

HostCopies::Buffers& HostCopies::buffers_of(int rank) {
  Buffers& buffers = kept_[rank];
  for (size_t slot = buffers.size(); slot < buffers_per_rank; ++slot) {
    buffers.push_back(std::make_shared<SnapshotBuffer>(cat(prefix_, rank, "-", slot, kept_suffix)));
  }
  return buffers;
}

void HostCopies::prepare(size_t slot, const std::vector<int64_t>& bytes) {
  if (++saves_ > static_cast<int>(buffers_per_rank)) {
    std::erase_if(kept_, [this](const auto& entry) {
      if (std::ranges::find(wards_, entry.first) != wards_.end()) return false;
      for (const auto& buffer : entry.second) buffer->remove();
      return true;
    });
  }
  for (const int ward : wards_) {
    buffers_of(ward)[slot]->make_room(static_cast<uint64_t>(bytes[static_cast<size_t>(ward)]));
  }
}

void HostCopies::begin(size_t slot, std::shared_ptr<SnapshotBuffer> own, std::shared_future<double> filled) {
  if (group_ == nullptr) return;
  const auto member = [this](int rank) {
    return static_cast<int>(std::ranges::find(members_, rank) - members_.begin());
  };
  std::vector<Side> out, in;
  if (keeper_ >= 0) out.push_back({.peer = member(keeper_), .buffer = own});
  for (const int ward : wards_) in.push_back({.peer = member(ward), .buffer = buffers_of(ward)[slot]});
  of_this_ = std::make_shared<Figures>();
  // It owns all that it touches: after a loss nobody waits for it.
  sending_ = job_->lane(comm::Traffic::copies)
                 .submit([group = group_, device = job_->device(), out = std::move(out), in = std::move(in),
                          filled = std::move(filled), figures = of_this_] {
                   filled.wait();
                   const os::TimePoint begin = os::now();
                   exchange(*group, device, out, in);
                   figures->seconds = os::seconds_since(begin);
                   for (const Side& side : out) figures->bytes += side.buffer->bytes().size();
                 });
}

void HostCopies::end() {
  if (!any_) return;
  wait();
  job_->everyone().barrier({"copies of snapshots"});
}

void HostCopies::wait() {
  std::exchange(sending_, {}).wait();
  if (const auto done = std::exchange(of_this_, nullptr)) {
    figures_.bytes += done->bytes;
    figures_.seconds += done->seconds;
  }
}

void HostCopies::remove() noexcept {
  try {
    wait();
  } catch (const comm::CommError&) {
    // Who was lost is told by those who go on.
  }
  try {
    for (const auto& [rank, buffers] : kept_) {
      for (const auto& buffer : buffers) buffer->remove();
    }
    kept_.clear();
  } catch (const std::exception& error) {
    log(LogLevel::warning, cat("a copy of another host's snapshot could not be taken away: ", error.what()));
  }
}

}  // namespace tesserae::snapshot
