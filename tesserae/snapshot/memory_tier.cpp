#include "tesserae/snapshot/memory_tier.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "tesserae/base/checksum.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/random_state.h"
#include "tesserae/comm/agree.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/random_name.h"
#include "tesserae/os/seconds.h"
#include "tesserae/snapshot/surviving_snapshots.h"

// To save, all ranks together:
//  1. each tells the next rank that owns the same chunk (in the next replica) its random numbers: all else of a rank's
//     part is there already;
//  2. each makes room in the buffer that does not hold its newest snapshot. If any rank cannot, the tier is switched
//     off on all: a set with a hole is no use;
//  3. each copies its part and seals it, beside the next forward and backward;
//  4. what would be lost with a host goes to another one, beside training (host_copies.cpp).
// Killed at any moment, every rank still has a whole snapshot of this save or of the one before, and not all of them
// need be equally far: that is why there are two buffers. (No rank is two saves ahead: in the step between two saves
// the ranks agree on something after each has waited for its copy.)
//
// To restore, all ranks together:
//  1. each says which snapshots it holds: whole, of this layout, by job and step;
//  2. all choose the same: the latest that every rank has itself or has with its neighbour;
//  3. neighbours send what is missing; each checks what it got, and that it fits the model;
//  4. only if all are well does any change its state.
// Snapshots of another layout, or of a job of another size, can become a checkpoint instead (surviving_snapshots.h).
namespace tesserae::snapshot {
namespace {

std::string key_of(const os::Path& checkpoints) {
  return to_hex(checksum(std::filesystem::absolute(checkpoints).lexically_normal().native()));
}

uint64_t session_of(comm::Fabric& fabric) {
  return from_hex(comm::text_of(fabric, os::random_name(), 0)).value();
}

/// Whether there is any state of the parameter that the name ("optimizer/STATE/PARAMETER") ends with; true for other
/// names.
bool has_state(const checkpoint::Manifest& manifest, std::string_view name) {
  constexpr std::string_view optimizer = "optimizer/";
  if (!name.starts_with(optimizer)) return true;
  const std::string_view parameter = name.substr(name.find('/', optimizer.size()));
  return std::ranges::any_of(manifest.tensors, [&](const checkpoint::StoredTensor& tensor) {
    const std::string_view other = tensor.name;
    return other.starts_with(optimizer) && other.substr(other.find('/', optimizer.size())) == parameter;
  });
}

constexpr const char* without_copies =
    "snapshots in memory are lost with their host from here on; is /dev/shm too small?";

/// From its making to its end.
class AddsTime {
 public:
  explicit AddsTime(double& seconds) : seconds_(seconds) {}
  ~AddsTime() { seconds_ += os::seconds_since(begin_); }
  AddsTime(const AddsTime&) = delete;
  AddsTime& operator=(const AddsTime&) = delete;

 private:
  double& seconds_;
  os::TimePoint begin_ = os::now();
};

}  // namespace

MemoryTier::MemoryTier(const Subject& subject, const mesh::Layout& layout, const os::Path& checkpoints,
                       const std::string& identity, bool on_other_hosts)
    : subject_(subject),
      layout_(layout),
      checkpoints_(checkpoints),
      folder_(cat("tesserae-", comm::text_of(*subject.job(), key_of(checkpoints), 0), "-")),
      prefix_(cat(folder_, identity, "-rank-")),
      session_(session_of(*subject.job())),
      on_other_hosts_(on_other_hosts),
      copies_(subject.job(), prefix_) {
  remove_orphans(folder_, prefix_);
  for (size_t buffer = 0; buffer < buffers_per_rank; ++buffer) {
    buffers_.push_back(std::make_shared<SnapshotBuffer>(cat(prefix_, subject.job()->rank(), "-", buffer)));
  }
  choose_keepers();
}

MemoryTier::~MemoryTier() {
  if (copying_.valid()) copying_.wait();
}

void MemoryTier::save(int64_t step, const nlohmann::json& description, bool last) {
  wait_copied();
  if (broken_) return;
  const AddsTime adds(figures_.waited_seconds);
  if (copies_.any() && !copies_.all_are_done() && !last) return;
  std::vector<checkpoint::Piece> pieces = own_pieces();
  for (checkpoint::Piece& piece : exchange_random()) pieces.push_back(std::move(piece));  // 1
  checkpoint::Manifest manifest;
  manifest.step = step;
  manifest.attempt = to_hex(session_);
  manifest.layout = layout_;
  manifest.axes = subject_.mesh->mesh().degrees();
  manifest.training = description;
  manifest.training[memory_key] = notes_of(pieces);
  const bool on_host = std::ranges::all_of(pieces, [](const checkpoint::Piece& piece) { return piece.data.is_cpu(); });
  if (!make_room(manifest, pieces)) {  // 2
    broken_ = true;
    return remove();
  }
  const size_t slot = std::exchange(next_, (next_ + 1) % buffers_per_rank);  // 3
  ++figures_.copies;
  figures_.bytes = buffers_[slot]->bytes().size();
  const auto copy = [buffer = buffers_[slot]] {
    const os::TimePoint begin = os::now();
    buffer->fill();
    return os::seconds_since(begin);
  };
  // What is on a device is copied on this thread's stream, behind what computes the values.
  copying_ = std::async(on_host ? std::launch::async : std::launch::deferred, copy).share();
  if (!on_host) copying_.wait();
  if (!last) send_copies(slot);  // 4
  copies_.tidy();
}

/// Step 2 of a save. False, on all ranks: some rank has none.
bool MemoryTier::make_room(const checkpoint::Manifest& manifest, const std::vector<checkpoint::Piece>& pieces) {
  const auto failure = [&]() -> std::string {
    try {
      buffers_[next_]->prepare(manifest, pieces);
      return "";
    } catch (const IoError& error) {
      return error.what();
    }
  };
  if (copies_.any()) {
    if (agree_on(failure(), without_copies)) return true;
    copies_.give_up();  // which makes room
  }
  return agree_on(failure(), "training goes on without snapshots in memory; is /dev/shm too small?");
}

void MemoryTier::wait_copied() {
  const AddsTime adds(figures_.waited_seconds);
  if (copying_.valid()) figures_.seconds += std::exchange(copying_, {}).get();
}

/// Step 4 of a save. `slot`: of this rank's newest snapshot; nothing: it has none. The one before may be copied still.
void MemoryTier::send_copies(std::optional<size_t> slot) {
  if (!copies_.any()) return;
  comm::Fabric& fabric = *subject_.job();
  std::vector<int64_t> table(static_cast<size_t>(fabric.size()) * 2, 0);
  if (slot) {
    const size_t own = static_cast<size_t>(fabric.rank()) * 2;
    table[own] = static_cast<int64_t>(buffers_[*slot]->bytes().size());
    table[own + 1] = static_cast<int64_t>(*slot);
  }
  table = comm::counts_over_ranks(fabric, table);
  std::vector<HostCopies::Sent> sent;
  for (size_t i = 0; i < table.size(); i += 2) {
    sent.push_back({.bytes = table[i], .slot = static_cast<size_t>(table[i + 1])});
  }
  std::string failure;
  try {
    copies_.prepare(sent);
  } catch (const IoError& error) {
    failure = error.what();
  }
  if (!agree_on(failure, without_copies)) return copies_.give_up();
  copies_.begin(slot ? buffers_[*slot] : nullptr, copying_);
}

/// `buffer`: of this rank's newest snapshot; -1: it has none. That one is not written over first, and is elsewhere,
/// too.
void MemoryTier::go_on_from(int buffer) {
  next_ = buffer == 0 ? 1 : 0;
  send_copies(buffer < 0 ? std::nullopt : std::optional(static_cast<size_t>(buffer)));
}

void MemoryTier::choose_keepers() {
  const mesh::World& world = subject_.job()->world();
  if (on_other_hosts_) copies_.use(keepers(world, subject_.mesh->mesh(), layout_));
}

MemoryTier::Figures MemoryTier::figures() const {
  Figures figures = figures_;
  figures.sent = copies_.figures();
  return figures;
}

bool MemoryTier::is_elsewhere() {
  return !copies_.any() || copies_.all_are_done();
}

void MemoryTier::layout_changed(const mesh::Layout& layout) {
  wait_copied();
  layout_ = layout;
  choose_keepers();
}

/// Step 1 of a save: the random numbers of the previous replica's rank, as pieces.
std::vector<checkpoint::Piece> MemoryTier::exchange_random() {
  comm::Fabric& fabric = *subject_.job();
  const int next = neighbour(subject_.mesh->mesh(), layout_, fabric.rank());
  if (next < 0) return {};
  const int previous = neighbour(subject_.mesh->mesh(), layout_, fabric.rank(), -1);
  std::vector<comm::Message> sends, receives;
  std::vector<checkpoint::Piece> pieces = checkpoint::random_pieces(fabric.rank(), fabric.device());
  const std::vector<checkpoint::Piece> named = checkpoint::random_pieces(previous, fabric.device());
  for (size_t i = 0; i < pieces.size(); ++i) {
    sends.push_back({.peer = next, .data = pieces[i].data.to(fabric.device())});
    receives.push_back({.peer = previous, .data = at::empty_like(sends.back().data)});
  }
  fabric.everyone().exchange(sends, receives);
  for (size_t i = 0; i < pieces.size(); ++i) {
    pieces[i].name = named[i].name;
    pieces[i].data = fabric.everyone().to_host(receives[i].data);
  }
  return pieces;
}

void MemoryTier::keep_newest() {
  const auto set = newest_complete_set(subject_.mesh->mesh(), layout_, held_by_ranks(), /*at_least=*/0);
  if (set) go_on_from(set->buffer[static_cast<size_t>(subject_.job()->rank())]);
}

std::optional<MemoryTier::Restored> MemoryTier::restore(int64_t at_least) {
  const std::optional<SnapshotSet> set =
      newest_complete_set(subject_.mesh->mesh(), layout_, held_by_ranks(), at_least);  // 1, 2
  if (!set) return std::nullopt;
  const int buffer = set->buffer[static_cast<size_t>(subject_.job()->rank())];
  const std::string_view own = buffer < 0 ? std::string_view() : buffers_[static_cast<size_t>(buffer)]->bytes();
  const std::optional<std::string> fetched = fetch(*set, own);  // 3
  const std::optional<MemorySnapshot> snapshot = parse_snapshot(fetched ? *fetched : own, "of this rank");
  const std::string failure = snapshot ? refusal(*snapshot) : "the snapshot arrived damaged";
  refused_ = !agree_on(failure, "the snapshots in memory are not used");
  if (refused_) return std::nullopt;
  take_over(*snapshot);                                         // 4
  remove_surviving_snapshots(prefix_, subject_.job()->size());  // of a larger job: this one has no ranks that could
  go_on_from(buffer);
  return Restored{.step = set->step, .description = snapshot->manifest.training};
}

std::optional<int64_t> MemoryTier::save_surviving(int64_t after) {
  if (refused_) return std::nullopt;
  const std::optional<int64_t> saved = save_surviving_snapshots(subject_, layout_, prefix_, checkpoints_, after);
  comm::counts_over_ranks(*subject_.job(), {0});  // nobody reads them any more
  return saved;
}

/// Step 1 of a restore.
HeldByRank MemoryTier::held_by_ranks() {
  comm::Fabric& fabric = *subject_.job();
  HeldByRank held(static_cast<size_t>(fabric.size()));
  std::vector<int64_t> table(held.size() * buffers_per_rank * 2, 0);  // for each buffer: session, step + 1
  for (size_t buffer = 0; buffer < buffers_per_rank; ++buffer) {
    const std::optional<MemorySnapshot> snapshot = buffers_[buffer]->read();
    if (!snapshot || snapshot->manifest.layout != layout_) continue;
    if (snapshot->manifest.axes != subject_.mesh->mesh().degrees()) continue;
    const size_t place = (static_cast<size_t>(fabric.rank()) * buffers_per_rank + buffer) * 2;
    table[place] = static_cast<int64_t>(from_hex(snapshot->manifest.attempt).value_or(0));
    table[place + 1] = snapshot->manifest.step + 1;
  }
  table = comm::counts_over_ranks(fabric, table);
  for (size_t i = 0; i < table.size(); i += 2) {
    held[i / 2 / buffers_per_rank][i / 2 % buffers_per_rank] = {.session = table[i], .step = table[i + 1] - 1};
  }
  return held;
}

/// Step 3: sends `own` to the rank that needs it, and returns what this rank needs; nothing if it has its own.
std::optional<std::string> MemoryTier::fetch(const SnapshotSet& set, std::string_view own) {
  comm::Fabric& fabric = *subject_.job();
  const auto lacks = [&set](int rank) { return rank >= 0 && set.buffer[static_cast<size_t>(rank)] < 0; };
  const int asking = neighbour(subject_.mesh->mesh(), layout_, fabric.rank(), -1);
  const int giving = neighbour(subject_.mesh->mesh(), layout_, fabric.rank());
  const auto on_device = [&fabric](const at::Tensor& tensor) { return tensor.to(fabric.device()); };
  const auto exchange = [&](const at::Tensor& out, const at::Tensor& in) {
    std::vector<comm::Message> sends, receives;
    if (lacks(asking) && out.numel() > 0) sends.push_back({.peer = asking, .data = on_device(out)});
    const at::Tensor arriving = in.device() == fabric.device() ? in : at::empty_like(in, fabric.device());
    if (lacks(fabric.rank()) && in.numel() > 0) receives.push_back({.peer = giving, .data = arriving});
    fabric.everyone().exchange(sends, receives);
    if (!arriving.is_same(in)) in.copy_(fabric.everyone().to_host(arriving));
  };
  const at::Tensor size = at::zeros({1}, at::kLong);
  exchange(at::full({1}, static_cast<int64_t>(own.size()), at::kLong), size);
  std::string received(static_cast<size_t>(size.item<int64_t>()), '\0');
  // A piece at a time, so that a deadline is one of a piece, and a device needs room for one.
  const auto piece_of = [](const char* bytes, size_t count, int64_t begin) {
    const int64_t left = std::clamp(static_cast<int64_t>(count) - begin, int64_t{0}, message_bytes);
    return at::from_blob(const_cast<char*>(left > 0 ? bytes + begin : bytes), {left}, at::kByte);
  };
  const int64_t most = comm::largest_over_ranks(fabric, {size.item<int64_t>()})[0];
  for (int64_t begin = 0; begin < most; begin += message_bytes) {
    exchange(piece_of(own.data(), own.size(), begin), piece_of(received.data(), received.size(), begin));
  }
  return lacks(fabric.rank()) ? std::optional(std::move(received)) : std::nullopt;
}

/// All of this rank, and what of it the first replica writes into a checkpoint, wherever this one is.
std::vector<checkpoint::Piece> MemoryTier::own_pieces() {
  std::vector<checkpoint::Piece> pieces =
      checkpoint::model_pieces(subject_.sharded, &subject_.optimizer, /*as_first_replica=*/true);
  subject_.optimizer.visit_state([&pieces](const shard::Shard& shard, std::string_view name, at::Tensor& tensor) {
    if (tensor.dim() > 0) return;
    pieces.push_back({.name = cat(counter_prefix, shard.index, "/", name),
                      .shape = tensor.sizes().vec(),
                      .elements = {0, tensor.numel()},
                      .data = tensor});
  });
  for (checkpoint::Piece& piece : checkpoint::random_pieces(subject_.job()->rank(), subject_.job()->device())) {
    pieces.push_back(std::move(piece));
  }
  for (const checkpoint::Piece& piece : subject_.alike) {
    pieces.push_back(piece);
    pieces.back().written = true;  // by whichever rank's snapshot is there
  }
  return pieces;
}

/// Why a snapshot cannot be this rank's state; empty: it can.
std::string MemoryTier::refusal(const MemorySnapshot& snapshot) {
  subject_.optimizer.allocate_state();
  for (const checkpoint::Piece& piece : own_pieces()) {
    if (piece.elements.empty() || piece.optional || !snapshot.find(piece).empty()) continue;
    // Before a shard's first gradient there is no state of it at all.
    if (piece.name.starts_with(counter_prefix) || !has_state(snapshot.manifest, piece.name)) continue;
    return cat("it has no \"", piece.name, "\" of this shape: it was saved from another model or optimizer");
  }
  return {};
}

/// Step 4 of a restore.
void MemoryTier::take_over(const MemorySnapshot& snapshot) {
  const at::NoGradGuard no_grad;
  const auto fill = [&snapshot](const checkpoint::Piece& piece) {
    const std::string_view bytes = snapshot.find(piece);
    if (bytes.empty()) return false;
    const at::Tensor values = at::from_blob(const_cast<char*>(bytes.data()), {piece.data.numel()},
                                            at::TensorOptions().dtype(piece.data.scalar_type()));
    piece.data.view({-1}).copy_(values);
    return true;
  };
  for (const checkpoint::Piece& piece : own_pieces()) {
    if (fill(piece) || piece.optional) continue;
    at::Tensor(piece.data).zero_();  // state of the optimizer that began after the snapshot
  }
  std::vector<c10::Device> devices{c10::kCPU, subject_.job()->device()};
  std::vector<checkpoint::Piece> random = checkpoint::random_pieces(subject_.job()->rank(), devices[1]);
  for (size_t i = 0; i < random.size(); ++i) {
    fill(random[i]);
    at::Generator generator = at::globalContext().defaultGenerator(devices[i]);
    generator.set_state(random[i].data);
  }
}

/// True if no rank failed; else rank 0 warns.
bool MemoryTier::agree_on(const std::string& failure, const std::string& consequence) {
  comm::Fabric& fabric = *subject_.job();
  const int rank = comm::lowest_rank_with(fabric, !failure.empty());
  if (rank < 0) return true;
  const std::string cause = comm::text_of(fabric, failure, rank);
  if (fabric.rank() == 0) log(LogLevel::warning, cat(consequence, " (rank ", rank, ": ", cause, ")"));
  return false;
}

void MemoryTier::remove_all() noexcept {
  remove();
  remove_surviving_snapshots(prefix_);
}

void MemoryTier::remove() noexcept {
  try {
    copies_.remove();
    wait_copied();
    for (auto& buffer : buffers_) release(buffer);  // it may be on its way to another host
  } catch (const std::exception& error) {
    log(LogLevel::warning, cat("a snapshot in memory could not be taken away: ", error.what()));
  }
}

}  // namespace tesserae::snapshot
