#include "tesserae/checkpoint/held_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "tesserae/base/copy.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/checkpoint/writer.h"
#include "tesserae/comm/agree.h"
#include "tesserae/offload/paged_tensor.h"

// After a step, all ranks together: each sends what it alone has to the next one, on several hosts to one of the next
// host (that of a lost rank or host is then with another). All else is named only: the memory is that of the model and
// the optimizer.
//
// When ranks were lost, all that have met again:
//  1. rank 0 commits what had been written whole and not been committed (writer.h), and says which step the folder has;
//     each says of which step it holds the state;
//  2. of the newest of these steps, each that holds it says which elements of which tensors. Of several that have the
//     same the first one writes. If an element is nobody's, or what a lost rank alone had, they try the step before;
//  3. they save, as any job does (saver.h).
// All hear the same and reckon alike: nobody is told what to write.
namespace tesserae::checkpoint {
namespace {

std::string pack(const std::vector<Piece>& pieces) {
  nlohmann::json described = nlohmann::json::array();
  std::string bytes;
  for (const Piece& piece : pieces) {
    described.push_back({piece.name, to_string(dtype_of(piece.data.scalar_type())), piece.shape});
    bytes.append(static_cast<const char*>(piece.data.const_data_ptr()), piece.data.nbytes());
  }
  return described.dump() + '\0' + bytes;
}

std::vector<Piece> unpack(const std::string& packed) {
  const size_t text = packed.find('\0');
  std::vector<Piece> pieces;
  const char* from = packed.data() + text + 1;
  for (const auto& described : nlohmann::json::parse(packed.substr(0, text))) {
    const auto type = scalar_type_of(dtype_from_name(described.at(1).get<std::string>()).value());
    const at::Tensor data = at::empty(described.at(2).get<std::vector<int64_t>>(), type);
    copy_memory(data.mutable_data_ptr(), from, data.nbytes());
    from += data.nbytes();
    pieces.push_back(replicated(described.at(0), data, 0));
    pieces.back().written = false;
  }
  return pieces;
}

/// From a rank to the one that has a copy of what it alone has: the next one; on several hosts one of another host, if
/// no host has more than half of the ranks.
int distance(const mesh::World& world) {
  if (world.hosts() == 1) return 1;
  int most = 0;
  for (int rank = 0, ranks = 0; rank < world.size(); rank += ranks) {  // host by host
    ranks = static_cast<int>(world.host_ranks(rank).size());
    most = std::max(most, ranks);
  }
  return most;
}

/// `bytes` to the rank that is to have them, and what this one is to have.
std::string pass_on(comm::Fabric& fabric, int distance, const std::string& bytes) {
  const int ranks = fabric.size(), next = (fabric.rank() + distance) % ranks;
  const int previous = (fabric.rank() + ranks - distance) % ranks;
  const auto exchange = [&](const at::Tensor& own, int64_t elements) {
    const at::Tensor there = own.to(fabric.device());
    const at::Tensor here = at::empty({elements}, there.options());
    fabric.everyone().exchange({{.peer = next, .data = there}}, {{.peer = previous, .data = here}},
                               {"what a rank alone has"});
    return fabric.everyone().to_host(here);
  };
  const auto size = exchange(at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong), 1).item<int64_t>();
  at::Tensor packed = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  copy_memory(packed.mutable_data_ptr(), bytes.data(), bytes.size());
  packed = exchange(packed, size);
  return {static_cast<const char*>(packed.const_data_ptr()), static_cast<size_t>(packed.numel())};
}

/// Which ranks hold what of the state of a step.
class Inventory {
 public:
  /// What rank `rank` tells, as told() made it.
  void add(int rank, const std::string& told) {
    const nlohmann::json all = nlohmann::json::parse(told);
    ranks_ = all.at("ranks").get<int>();
    for (const auto& owner : all.at("owners")) owners_.insert(owner.get<int>());
    size_t piece = 0;
    for (const auto& run : all.at("pieces")) {
      const auto name = run.at(0).get<std::string>();
      const auto elements = run.at(3).get<int64_t>();
      Tensor& tensor = tensors_.try_emplace(name, Tensor{.elements = elements, .runs = {}}).first->second;
      const std::pair<int, size_t> number{rank, piece++};
      if (tensor.elements == elements) {
        take(tensor, {run.at(1).get<int64_t>(), run.at(2).get<int64_t>()}, number);
      } else if (name.starts_with("model/") || name.starts_with("optimizer/")) {
        torn_ = true;  // what else a script says may differ from rank to rank: the first one's counts
      }
    }
  }

  static std::string told(const HeldState& held) {
    nlohmann::json pieces = nlohmann::json::array();
    for (const Piece& piece : held.state().pieces) {
      const mesh::Range stored = stored_elements(piece);
      int64_t elements = 1;
      for (const int64_t size : piece.shape) elements *= size;
      pieces.push_back({piece.name, stored.begin, stored.end, elements});
    }
    return nlohmann::json{{"ranks", held.ranks()}, {"owners", held.owners()}, {"pieces", std::move(pieces)}}.dump();
  }

  /// Why it is no whole state; empty: it is.
  std::string lack() const {
    if (torn_) return "ranks cut a tensor in different ways";
    for (const auto& [name, tensor] : tensors_) {
      int64_t there = 0;
      for (const auto& [begin, run] : tensor.runs) there += run.size();
      if (there < tensor.elements) return cat(tensor.elements - there, " elements of ", name, " are with nobody");
    }
    if (owners_.size() < static_cast<size_t>(ranks_)) return "the random numbers of a rank are with nobody";
    return "";
  }
  /// Whether that rank is the one that writes piece number `piece` of its own.
  bool writes(int rank, size_t piece) const { return writers_.contains({rank, piece}); }

 private:
  struct Tensor {
    int64_t elements = 0;
    bool named = false;                   // by whoever writes it, if it has no elements
    std::map<int64_t, mesh::Range> runs;  // by their beginning
  };

  void take(Tensor& tensor, const mesh::Range& run, const std::pair<int, size_t>& piece) {
    if (tensor.elements == 0 && !std::exchange(tensor.named, true)) writers_.insert(piece);  // all there is is its name
    if (run.empty()) return;
    const auto after = tensor.runs.lower_bound(run.begin);
    if (after != tensor.runs.end() && after->second == run) return;  // a rank before has it
    const bool meets_after = after != tensor.runs.end() && after->first < run.end;
    const bool meets_before = after != tensor.runs.begin() && std::prev(after)->second.end > run.begin;
    if (meets_after || meets_before) {  // ranks that cut a tensor otherwise are of no job
      torn_ = true;
      return;
    }
    tensor.runs.emplace(run.begin, run);
    writers_.insert(piece);
  }

  std::map<std::string, Tensor> tensors_;
  std::set<std::pair<int, size_t>> writers_;
  std::set<int> owners_;
  int ranks_ = 0;
  bool torn_ = false;
};

/// Step 1: by rank, what each holds, as a step + 1; and what the folder has.
std::pair<std::vector<int64_t>, int64_t> steps_held(comm::Fabric& fabric, const HeldState* held, const os::Path& folder,
                                                    int keep) {
  std::vector<int64_t> steps(static_cast<size_t>(fabric.size()) + 1, 0);
  if (held != nullptr) steps[static_cast<size_t>(fabric.rank())] = held->state().step + 1;
  if (fabric.rank() == 0) {
    try {
      commit_left_behind(folder, keep);
      const std::vector<Committed> committed = list_checkpoints(folder);
      if (!committed.empty()) steps.back() = committed.back().step + 1;
    } catch (const Error& failure) {
      log(LogLevel::warning, cat("what was written whole could not be committed: ", failure.what()));
    }
  }
  steps = comm::counts_over_ranks(fabric, steps);
  const int64_t saved = steps.back();
  steps.pop_back();
  return {steps, saved};
}

}  // namespace

HeldState::HeldState(comm::Fabric& fabric, State state, std::vector<Piece> own)
    : state_(std::move(state)), ranks_(fabric.size()), owners_{fabric.rank()} {
  const at::NoGradGuard no_grad;
  for (Piece& piece : state_.pieces) {
    if (!std::exchange(piece.changes_in_forward, false)) continue;
    const at::Tensor now = at::empty_like(piece.data);
    offload::copy(now.view({-1}), piece.data.view({-1}));
    piece.data = now;
  }
  if (ranks_ > 1) {
    const int apart = distance(fabric.world());
    owners_.push_back((fabric.rank() + ranks_ - apart) % ranks_);
    std::vector<Piece> of_another = unpack(pass_on(fabric, apart, pack(own)));
    std::ranges::move(of_another, std::back_inserter(state_.pieces));
  }
  std::ranges::move(own, std::back_inserter(state_.pieces));
}

std::optional<int64_t> save_held(const std::shared_ptr<comm::Fabric>& fabric, const HeldState* held,
                                 const os::Path& folder, int keep) {
  const auto [steps, saved] = steps_held(*fabric, held, folder, keep);  // 1
  std::set<int64_t, std::greater<>> newest_first(steps.begin(), steps.end());
  for (const int64_t step : newest_first) {
    if (step <= saved) break;
    const bool holds = held != nullptr && held->state().step + 1 == step;
    const std::string own = holds ? Inventory::told(*held) : "";
    Inventory inventory;  // 2
    for (int rank = 0; rank < fabric->size(); ++rank) {
      if (steps[static_cast<size_t>(rank)] == step) inventory.add(rank, comm::text_of(*fabric, own, rank));
    }
    if (const std::string lack = inventory.lack(); !lack.empty()) {
      if (fabric->rank() == 0) log(LogLevel::info, cat("step ", step - 1, " is not held together any more: ", lack));
      continue;
    }
    const auto first = static_cast<int>(std::ranges::find(steps, step) - steps.begin());
    const std::string training = comm::text_of(*fabric, holds ? held->state().training.dump() : "", first);
    State state{.step = step - 1, .layout = {fabric->size(), {}}, .training = nlohmann::json::parse(training)};
    for (size_t i = 0; holds && i < held->state().pieces.size(); ++i) {
      state.pieces.push_back(held->state().pieces[i]);
      state.pieces.back().written = inventory.writes(fabric->rank(), i);
    }
    Saver(fabric, {.folder = folder, .keep = keep}).save(std::move(state));  // 3
    return step - 1;
  }
  return std::nullopt;
}

}  // namespace tesserae::checkpoint
