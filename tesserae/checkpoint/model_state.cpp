#include "tesserae/checkpoint/model_state.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/checkpoint/handover.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/comm/group.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/optim/optimizer.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::checkpoint {
namespace {

using shard::Engine;

/// The flat buffer behind each shard, by its index.
std::vector<const shard::Flat*> flats_by_shard(Engine& engine) {
  std::vector<const shard::Flat*> flats(engine.shards().size());
  for (const shard::FlatBuffer* buffer : engine.buffers()) {
    if (buffer->shard() != nullptr) flats[static_cast<size_t>(buffer->shard()->index)] = &buffer->flat();
  }
  return flats;
}

/// The slices of a rank's part of a flat buffer as pieces. `written`: those of which tensor-parallel ranks hold parts;
/// `repeated_written`: those that all of them hold.
void add_slices(const std::string& prefix, const std::vector<shard::Slice>& slices, const at::Tensor& part,
                bool written, bool repeated_written, std::vector<Piece>& pieces) {
  for (const shard::Slice& slice : slices) {
    const int64_t count = slice.end - slice.begin;
    pieces.push_back({.name = prefix + slice.name,
                      .shape = slice.whole,
                      .split = slice.split,
                      .elements = {slice.offset, slice.offset + count},
                      .data = part.detach().narrow(0, slice.begin, count),
                      .written = slice.split.along(mesh::Axis::tensor).whole() ? repeated_written : written});
  }
}

/// Among the ranks that shard the buffer's state, which may be fewer than those that shard the model's.
bool written_here(const shard::Flat& flat, bool as_first_replica) {
  return as_first_replica || writes_part(flat, flat.rank());
}

void add_parameters(shard::Sharded& sharded, bool as_first_replica, std::vector<Piece>& pieces) {
  const bool first = sharded.mesh().writes_unsplit();
  for (const shard::FlatBuffer* buffer : sharded.engine().buffers()) {
    const shard::FlatParameter& parameter = buffer->parameter();
    const bool written = written_here(buffer->flat(), as_first_replica);
    add_slices("model/", buffer->flat().slices(parameter.local_range()), parameter.local(), written, written && first,
               pieces);
  }
}

std::string state_prefix(std::string_view state) {
  return cat("optimizer/", state, "/");
}

/// A counter is one for a flat buffer and saved once for each parameter in it, by who has the first element of the
/// whole tensor.
void add_counter(const shard::Shard& shard, std::string_view state, const at::Tensor& counter, bool written,
                 std::vector<Piece>& pieces) {
  for (const shard::Slice& slice : shard.slices) {
    if (slice.offset != 0 || mesh::part_begin(slice.whole, slice.split) != 0) continue;
    pieces.push_back({.name = state_prefix(state) + slice.name,
                      .shape = {},
                      .elements = {0, 1},
                      .data = counter,
                      .written = written});
  }
}

/// A flat buffer's counter, to be set once what was saved for each of its parameters is known.
struct Counter {
  at::Tensor live;
  std::vector<Piece> saved;

  Counter(const shard::Flat& flat, std::string_view state, at::Tensor counter) : live(std::move(counter)) {
    const at::Tensor values = at::zeros({static_cast<int64_t>(flat.slots().size())}, live.scalar_type());
    for (const shard::Slot& slot : flat.slots()) {
      if (slot.elements == 0) continue;
      saved.push_back({.name = state_prefix(state) + slot.names.front(),
                       .shape = {},
                       .elements = {0, 1},
                       .data = values.narrow(0, static_cast<int64_t>(saved.size()), 1),
                       .optional = true});
    }
  }

  void set() const {
    if (saved.empty()) return;
    const double first = saved.front().data.item<double>();
    for (const Piece& piece : saved) {
      const double other = piece.data.item<double>();
      if (other == first) continue;
      throw InvalidArgument("load_model", cat(piece.name, " is ", other, " and ", saved.front().name, " is ", first,
                                              ", but both parameters are updated together here: shard the model in the "
                                              "same units as when it was saved"));
    }
    at::Tensor(live).fill_(first);
  }
};

/// Where the values come from.
struct Origin {
  std::string name;  // for people
  std::function<bool(const std::string&)> has;
  std::function<void(const std::vector<Piece>&)> fill;
};

/// State of a parameter may be missing as long as its counter is: it had no gradient yet.
void require_state(const Origin& from, const std::vector<Piece>& pieces, std::string_view state) {
  const std::string prefix = state_prefix(state);
  for (const Piece& piece : pieces) {
    const std::string counter = state_prefix("step") + piece.name.substr(prefix.size());
    if (from.has(piece.name) || !from.has(counter)) continue;
    throw InvalidArgument("load_model", cat(from.name, " has no ", piece.name,
                                            " though the parameter was updated: it was saved with another optimizer"));
  }
}

/// The optimizer's state as pieces to fill; counters are left to the caller.
std::vector<Counter> add_state(const Origin& from, shard::Sharded& sharded, optim::Optimizer& optimizer,
                               std::vector<Piece>& pieces) {
  const auto flats = flats_by_shard(sharded.engine());
  std::vector<Counter> counters;
  optimizer.allocate_state();
  optimizer.visit_state([&](const shard::Shard& shard, std::string_view state, at::Tensor& tensor) {
    if (tensor.dim() == 0) {
      counters.emplace_back(*flats[static_cast<size_t>(shard.index)], state, tensor);
      pieces.insert(pieces.end(), counters.back().saved.begin(), counters.back().saved.end());
      return;
    }
    std::vector<Piece> slices;
    add_slices(state_prefix(state), shard.slices, tensor, false, false, slices);
    require_state(from, slices, state);
    const bool all = std::ranges::all_of(slices, [&](const Piece& piece) { return from.has(piece.name); });
    if (!all) offload::zero(tensor);  // padding is zero as it is
    for (Piece& piece : slices) {
      piece.optional = true;
      pieces.push_back(std::move(piece));
    }
  });
  return counters;
}

/// A model with fewer layers would take a part of the checkpoint's for the whole.
void require_known(const Checkpoint& checkpoint, const Engine& engine, const std::vector<Piece>& more) {
  std::set<std::string, std::less<>> known;
  for (const shard::FlatBuffer* buffer : engine.buffers()) {
    for (const shard::Slot& slot : buffer->flat().slots()) {
      for (const std::string& name : slot.names) known.insert("model/" + name);
    }
  }
  for (const Piece& piece : more) known.insert(piece.name);
  for (const StoredTensor& tensor : checkpoint.manifest().tensors) {
    if (!tensor.name.starts_with("model/") || known.contains(tensor.name)) continue;
    throw InvalidArgument("load_model", cat(checkpoint.path().native(), " has ", tensor.name,
                                            ", which this model does not have: it was saved of another model"));
  }
}

/// All at once: each block of each file is read once, and the ranks hand each other their state in one go.
void fill_model(const Origin& from, shard::Sharded& sharded, optim::Optimizer* optimizer, std::vector<Piece> pieces) {
  std::vector<Counter> counters;
  sharded.engine().complete_updates();
  add_parameters(sharded, false, pieces);
  if (optimizer != nullptr) counters = add_state(from, sharded, *optimizer, pieces);
  from.fill(pieces);
  for (const Counter& counter : counters) counter.set();
}

}  // namespace

bool writes_part(const shard::Flat& flat, int rank) {
  return flat.layout().replica(rank) == 0;
}

std::vector<Piece> model_pieces(shard::Sharded& sharded, optim::Optimizer* optimizer, bool as_first_replica) {
  std::vector<Piece> pieces;
  sharded.engine().complete_updates();
  add_parameters(sharded, as_first_replica, pieces);
  if (optimizer == nullptr) return pieces;
  const auto flats = flats_by_shard(sharded.engine());
  const bool first = sharded.mesh().writes_unsplit();
  optimizer->visit_state([&](const shard::Shard& shard, std::string_view state, at::Tensor& tensor) {
    const bool written = written_here(*flats[static_cast<size_t>(shard.index)], as_first_replica);
    if (tensor.dim() == 0) {
      add_counter(shard, state, tensor, written && first, pieces);
    } else {
      add_slices(state_prefix(state), shard.slices, tensor, written, written && first, pieces);
    }
  });
  return pieces;
}

void load_model(const Checkpoint& checkpoint, shard::Sharded& sharded, optim::Optimizer* optimizer,
                std::vector<Piece> more) {
  require_known(checkpoint, sharded.engine(), more);
  const auto has = [&checkpoint](const std::string& name) { return checkpoint.manifest().find(name) != nullptr; };
  const auto fill = [&checkpoint](const std::vector<Piece>& pieces) { load(checkpoint, pieces); };
  fill_model({checkpoint.path().native(), has, fill}, sharded, optimizer, std::move(more));
}

void take_over_model(const Handover& from, shard::Sharded& sharded, optim::Optimizer* optimizer,
                     std::vector<Piece> more) {
  const auto has = [&from](const std::string& name) { return from.has(name); };
  const auto fill = [&from](const std::vector<Piece>& pieces) { from.fill(pieces); };
  fill_model({"the state of the job", has, fill}, sharded, optimizer, std::move(more));
}

void publish_model(shard::Sharded& sharded) {
  for (const auto& unit : sharded.engine().units()) unit->publish();
}

}  // namespace tesserae::checkpoint
