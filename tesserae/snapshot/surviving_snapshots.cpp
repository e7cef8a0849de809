#include "tesserae/snapshot/surviving_snapshots.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include "tesserae/base/checksum.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/checkpoint/split_json.h"
#include "tesserae/comm/agree.h"
#include "tesserae/mesh/mesh.h"
#include "tesserae/os/shared_memory.h"
#include "tesserae/shard/engine.h"
#include "tesserae/snapshot/host_copies.h"
#include "tesserae/snapshot/snapshot_buffer.h"
#include "tesserae/snapshot/snapshot_set.h"

// All ranks together:
//  1. each reads and checks its share of the snapshots on its host, whichever rank they are of;
//  2. they agree on a past job: the one with the newest snapshot, its mesh and layout;
//  3. each says which snapshots of that job it has read, so that all know of which ranks of the past job there is one,
//     and choose the newest complete set, as if that job had been restarted (snapshot_set.h). If there is none, they
//     try the job with the next older snapshot. A rank's own and the copy that another host kept of it count once;
//  4. of ranks of the past job that held the same, the first that has one is written: each rank writes those that it
//     has read, as parts of an ordinary checkpoint.
namespace tesserae::snapshot {
namespace {

/// A snapshot in memory of this host, of rank `rank` of a past job.
struct Survivor {
  int rank;
  size_t buffer;
  size_t kept;  ///< 1: by a rank of another host
  SnapshotBuffer memory;
  MemorySnapshot snapshot;

  int64_t session() const { return static_cast<int64_t>(from_hex(snapshot.manifest.attempt).value_or(0)); }
};

/// A job that is over, as its snapshots tell of it.
struct Past {
  mesh::Layout layout{1, {}};
  mesh::AxisDegrees axes;
  int64_t session = 0;
  int64_t newest = 0;  ///< step

  mesh::Mesh mesh() const { return mesh::Mesh(layout.ranks() * axes.tensor, axes); }
  bool made(const Survivor& survivor) const {
    const checkpoint::Manifest& manifest = survivor.snapshot.manifest;
    return manifest.layout == layout && manifest.axes == axes && survivor.session() == session &&
           survivor.rank < mesh().ranks();
  }
};

/// Every n-th name, n ranks being on this host.
std::vector<std::string> share_of(const comm::Fabric& fabric, const std::string& prefix) {
  const std::vector<int> neighbours = fabric.world().host_ranks(fabric.rank());
  const auto own = static_cast<size_t>(std::ranges::find(neighbours, fabric.rank()) - neighbours.begin());
  const std::vector<std::string> names = os::SharedMemory::names(prefix);
  std::vector<std::string> share;
  for (size_t i = own; i < names.size(); i += neighbours.size()) share.push_back(names[i]);
  return share;
}

/// Step 1. What a name ends with is "RANK-SLOT", or "RANK-SLOT-kept".
std::vector<Survivor> read_share(const comm::Fabric& fabric, const std::string& prefix) {
  std::vector<Survivor> found;
  for (const std::string& name : share_of(fabric, prefix)) {
    int rank = -1;
    size_t buffer = 0;
    const char *const begin = name.data() + prefix.size(), *const end = name.data() + name.size();
    const auto [dash, bad] = std::from_chars(begin, end, rank);
    if (bad != std::errc() || dash == end || *dash != '-') continue;
    if (std::from_chars(dash + 1, end, buffer).ec != std::errc() || buffer >= buffers_per_rank) continue;
    SnapshotBuffer memory(name);
    if (std::optional<MemorySnapshot> snapshot = memory.read()) {
      found.push_back({.rank = rank,
                       .buffer = buffer,
                       .kept = name.ends_with(kept_suffix) ? size_t{1} : size_t{0},
                       .memory = std::move(memory),
                       .snapshot = std::move(*snapshot)});
    }
  }
  return found;
}

/// Step 2: the job with the newest snapshot of a step after `after` and before `before`.
std::optional<Past> newest_past(comm::Fabric& fabric, const std::vector<Survivor>& found, int64_t after,
                                int64_t before) {
  std::vector<int64_t> newest(static_cast<size_t>(fabric.size()), 0);
  const Survivor* own = nullptr;
  for (const Survivor& survivor : found) {
    const int64_t step = survivor.snapshot.manifest.step;
    if (step <= after || step >= before) continue;
    if (own == nullptr || step > own->snapshot.manifest.step) own = &survivor;
  }
  if (own != nullptr) newest[static_cast<size_t>(fabric.rank())] = own->snapshot.manifest.step + 1;
  newest = comm::counts_over_ranks(fabric, newest);
  const auto best = std::ranges::max_element(newest);
  if (*best == 0) return std::nullopt;
  const auto teller = static_cast<int>(best - newest.begin());
  std::string text;
  if (fabric.rank() == teller) {
    const checkpoint::Manifest& manifest = own->snapshot.manifest;
    const mesh::Degrees degrees = manifest.layout.degrees();
    const mesh::AxisDegrees axes = manifest.axes;
    const nlohmann::json told{manifest.layout.ranks(),
                              degrees.parameters,
                              degrees.gradients,
                              degrees.optimizer,
                              axes.tensor,
                              axes.context,
                              axes.expert,
                              own->session()};
    text = told.dump();
  }
  const nlohmann::json told = nlohmann::json::parse(comm::text_of(fabric, text, teller));
  const auto number = [&told](size_t i) { return told[i].get<int>(); };
  return Past{.layout = {number(0), {.parameters = number(1), .gradients = number(2), .optimizer = number(3)}},
              .axes = {.tensor = number(4), .context = number(5), .expert = number(6)},
              .session = told[7].get<int64_t>(),
              .newest = *best - 1};
}

/// A set, and what of it this rank has.
struct Chosen {
  SnapshotSet set;
  std::vector<const Survivor*> own;
};

/// Step 3.
std::optional<Chosen> complete_set(comm::Fabric& fabric, const std::vector<Survivor>& found, const Past& past,
                                   int64_t after) {
  constexpr size_t places = 2 * buffers_per_rank;  // of a past rank: its own buffers, and their copies
  const auto past_ranks = static_cast<size_t>(past.mesh().ranks());
  std::vector<const Survivor*> own(past_ranks * places, nullptr);
  for (const Survivor& survivor : found) {
    if (!past.made(survivor)) continue;
    own[static_cast<size_t>(survivor.rank) * places + survivor.kept * buffers_per_rank + survivor.buffer] = &survivor;
  }
  // The later step is the larger number, and of the same the lower rank's.
  const int64_t ranks = fabric.size();
  const auto bid = [&](const Survivor* survivor) {
    return survivor ? (survivor->snapshot.manifest.step + 1) * ranks + ranks - 1 - fabric.rank() : 0;
  };
  std::vector<int64_t> bids;
  std::ranges::transform(own, std::back_inserter(bids), bid);
  const std::vector<int64_t> best = comm::largest_over_ranks(fabric, bids);
  const auto step_at = [&](size_t place) { return best[place] / ranks - 1; };

  // The two newest of each rank, wherever they are.
  HeldByRank held(past_ranks);
  std::vector<std::array<size_t, buffers_per_rank>> where(past_ranks);
  for (size_t rank = 0; rank < past_ranks; ++rank) {
    for (size_t buffer = 0; buffer < buffers_per_rank; ++buffer) {
      held[rank][buffer] = {.session = past.session, .step = -1};
      for (size_t place = rank * places; place < (rank + 1) * places; ++place) {
        const bool older = buffer == 0 || step_at(place) < held[rank][buffer - 1].step;
        if (!older || step_at(place) <= held[rank][buffer].step) continue;
        held[rank][buffer].step = step_at(place);
        where[rank][buffer] = place;
      }
    }
  }
  const auto set = newest_complete_set(past.mesh(), past.layout, held, after + 1);
  if (!set) return std::nullopt;
  Chosen chosen{.set = *set, .own = {}};
  for (size_t rank = 0; rank < past_ranks; ++rank) {
    if (set->buffer[rank] < 0) continue;
    const size_t place = where[rank][static_cast<size_t>(set->buffer[rank])];
    if (own[place] != nullptr && bids[place] == best[place]) chosen.own.push_back(own[place]);
  }
  return chosen;
}

/// Whether this one of the set writes the chunk that it shares with ranks of other replicas; `experts`: of experts.
bool writes_chunk(const Past& past, const SnapshotSet& set, int rank, bool experts) {
  std::vector<bool> left;
  for (const int buffer : set.buffer) left.push_back(buffer >= 0);
  return first_holder(past.mesh(), past.layout, rank, experts, left) == rank;
}

/// How the parameter is split that a piece is of; its state, too, and its counter, which has no parts.
mesh::Splits split_of(const nlohmann::json& notes, std::string_view name) {
  constexpr std::string_view optimizer = "optimizer/";
  std::string parameter(name);
  if (name.starts_with(optimizer)) parameter = cat("model/", name.substr(name.find('/', optimizer.size()) + 1));
  const auto note = notes.find(parameter);
  if (note == notes.end() || !note->contains("split")) return {};
  return checkpoint::splits_from(note->at("split"));
}

/// Step 4: of one snapshot. `same_groups`: random numbers are of use to the new job.
void add_pieces(const Survivor& survivor, const Past& past, const SnapshotSet& set, bool same_groups,
                std::vector<checkpoint::Piece>& pieces) {
  const checkpoint::Manifest& manifest = survivor.snapshot.manifest;
  const bool chunk = writes_chunk(past, set, survivor.rank, false);
  const bool experts = writes_chunk(past, set, survivor.rank, true);
  const nlohmann::json notes = manifest.training.value(memory_key, nlohmann::json::object());
  for (const checkpoint::StoredTensor& tensor : manifest.tensors) {
    const bool random = tensor.name.starts_with("random/");
    const auto note = notes.find(tensor.name);
    const bool of_experts = !split_of(notes, tensor.name).along(mesh::Axis::expert).whole();
    bool written = (of_experts ? experts : chunk) && !tensor.name.starts_with(counter_prefix) &&
                   (note == notes.end() || note->at("written").get<bool>());
    if (random) {
      // That of the rank before it is there, too, in case that one is gone.
      int of = -1;
      const char* const begin = tensor.name.data() + std::string_view("random/").size();
      std::from_chars(begin, tensor.name.data() + tensor.name.size(), of);
      const bool gone =
          of >= 0 && static_cast<size_t>(of) < set.buffer.size() && set.buffer[static_cast<size_t>(of)] < 0;
      written = same_groups && (of == survivor.rank || gone);
    }
    if (tensor.name.starts_with("buffer/")) {
      // All have the same: the first of them.
      const auto first = std::ranges::find_if(set.buffer, [](int buffer) { return buffer >= 0; });
      written = survivor.rank == first - set.buffer.begin();
    }
    if (!written) continue;
    const checkpoint::Extent& extent = tensor.extents.front();
    mesh::Splits split;
    if (note != notes.end() && note->contains("split")) {
      split = past.mesh().part(checkpoint::splits_from(note->at("split")), survivor.rank);
    }
    char* const data = const_cast<char*>(survivor.snapshot.data.data()) + extent.offset;
    pieces.push_back({.name = tensor.name,
                      .shape = tensor.shape,
                      .split = split,
                      .elements = extent.elements,
                      .data = at::from_blob(data, {extent.elements.size()},
                                            at::TensorOptions().dtype(checkpoint::scalar_type_of(tensor.dtype)))});
  }
}

/// Whether these are values of this model, as far as this rank has read them.
bool fits(const Subject& subject, const std::vector<checkpoint::Piece>& pieces) {
  std::map<std::string, std::vector<int64_t>, std::less<>> shapes;
  for (const shard::FlatBuffer* buffer : subject.sharded.engine().buffers()) {
    for (const shard::Slot& slot : buffer->flat().slots()) shapes[slot.names.front()] = slot.whole;
  }
  constexpr std::string_view prefix = "model/";
  return std::ranges::all_of(pieces, [&](const checkpoint::Piece& piece) {
    if (!piece.name.starts_with(prefix)) return true;
    const auto found = shapes.find(std::string_view(piece.name).substr(prefix.size()));
    return found != shapes.end() && found->second == piece.shape;
  });
}

bool save(const Subject& subject, const mesh::Layout& layout, const Chosen& chosen, const Past& past,
          const os::Path& folder) {
  const SnapshotSet& set = chosen.set;
  comm::Fabric& fabric = *subject.job();
  checkpoint::State whole{.step = set.step, .layout = layout, .axes = subject.mesh->mesh().degrees(), .pieces = {}};
  std::string description;
  for (const Survivor* const survivor : chosen.own) {
    add_pieces(*survivor, past, set, past.axes == subject.mesh->mesh().degrees(), whole.pieces);
    nlohmann::json said = survivor->snapshot.manifest.training;
    said.erase(memory_key);
    description = said.dump();
  }
  if (comm::lowest_rank_with(fabric, !fits(subject, whole.pieces)) >= 0) {
    if (fabric.rank() == 0) log(LogLevel::warning, "the snapshots in memory are not used: they are of another model");
    return false;
  }
  const int teller = comm::lowest_rank_with(fabric, !description.empty());
  whole.training = nlohmann::json::parse(comm::text_of(fabric, description, teller));
  if (fabric.rank() == 0) {
    log(LogLevel::warning,
        cat("snapshots in memory are of ", past.mesh().ranks(), " ranks with ", mesh::to_string(past.layout.degrees()),
            ": step ", set.step, " is saved to ", folder.native(), " to go on from"));
  }
  checkpoint::Saver saver(subject.job(), {.folder = folder});
  saver.save(std::move(whole));
  return true;
}

}  // namespace

nlohmann::json notes_of(const std::vector<checkpoint::Piece>& pieces) {
  nlohmann::json notes = nlohmann::json::object();
  for (const checkpoint::Piece& piece : pieces) {
    if (piece.written && piece.split.whole()) continue;
    notes[piece.name] = {{"written", piece.written}};
    if (!piece.split.whole()) notes[piece.name]["split"] = checkpoint::json_of(piece.split);
  }
  return notes;
}

std::optional<int64_t> save_surviving_snapshots(const Subject& subject, const mesh::Layout& layout,
                                                const std::string& prefix, const os::Path& folder, int64_t after) {
  comm::Fabric& fabric = *subject.job();
  const std::vector<Survivor> found = read_share(fabric, prefix);
  for (int64_t before = INT64_MAX;;) {
    const std::optional<Past> past = newest_past(fabric, found, after, before);
    if (!past) return std::nullopt;
    if (const std::optional<Chosen> chosen = complete_set(fabric, found, *past, after)) {
      return save(subject, layout, *chosen, *past, folder) ? std::optional(chosen->set.step) : std::nullopt;
    }
    before = past->newest;
  }
}

void remove_surviving_snapshots(const std::string& prefix, int from) noexcept {
  try {
    for (const std::string& name : os::SharedMemory::names(prefix)) {
      if (std::atoi(name.c_str() + prefix.size()) >= from) os::SharedMemory::remove(name);
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, cat("a snapshot in memory could not be taken away: ", error.what()));
  }
}

void remove_orphans(const std::string& folder, const std::string& run) noexcept {
  try {
    for (const std::string& name : os::SharedMemory::names(folder)) {
      if (!name.starts_with(run)) os::SharedMemory::remove(name);
    }
  } catch (const std::exception& error) {
    log(LogLevel::info, cat("what another run left in memory stays there: ", error.what()));
  }
}

}  // namespace tesserae::snapshot
