#include "tesserae/checkpoint/load.h"

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

#include "tesserae/base/log.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/placement.h"
#include "tesserae/comm/agree.h"
#include "tesserae/offload/paged_tensor.h"

namespace tesserae::checkpoint {
namespace {

/// What to read for a piece, and where to put it.
void add_wanted(const Checkpoint& checkpoint, const StoredTensor& stored, const Piece& piece,
                std::vector<Wanted>& wanted) {
  const auto placement = std::make_shared<Placement>(piece, stored.split, scalar_type_of(stored.dtype));
  const bool as_it_is = placement->contiguous() && scalar_type_of(stored.dtype) == piece.data.scalar_type() &&
                        piece.data.is_cpu() && !offload::is_paged(piece.data);
  const auto block = static_cast<int64_t>(checkpoint.manifest().block_bytes);
  for (const mesh::Range& run : placement->runs(block / element_bytes(stored.dtype))) {
    Wanted want{piece.name, run};
    if (as_it_is) {
      want.destination = static_cast<char*>(piece.data.mutable_data_ptr());
    } else {
      want.take = [placement](int64_t first, std::string_view bytes) { placement->put(first, bytes); };
    }
    wanted.push_back(std::move(want));
  }
}

/// What a failure to load is about, the worst last.
enum class Cause { none, bytes, disk, other };

/// What became of an attempt to load one checkpoint on all ranks.
struct Outcome {
  std::optional<Checkpoint> checkpoint;
  Cause cause = Cause::none;  // the worst of all ranks
  std::string failure;        // of the lowest rank that failed
  Cause own_cause = Cause::none;
  std::exception_ptr own;  // of this rank
};

/// Loads one checkpoint and tells the other ranks how it went. Whatever fails, every rank comes to the end.
Outcome attempt(comm::Fabric& fabric, const os::Path& path, const LoadInto& into) {
  Outcome outcome;
  std::string failure;
  const auto failed = [&](Cause cause, const std::exception& error) {
    outcome.own_cause = cause;
    outcome.own = std::current_exception();
    failure = error.what();
  };
  try {
    Checkpoint checkpoint = Checkpoint::open(path);
    into(checkpoint);
    outcome.checkpoint.emplace(std::move(checkpoint));
  } catch (const comm::CommError&) {
    throw;  // the other ranks cannot be told
  } catch (const Corruption& error) {
    failed(Cause::bytes, error);
  } catch (const IoError& error) {
    failed(Cause::disk, error);
  } catch (const std::exception& error) {
    failed(Cause::other, error);
  }
  const int rank = comm::lowest_rank_with(fabric, outcome.own_cause != Cause::none);
  if (rank < 0) return outcome;
  outcome.checkpoint.reset();
  outcome.failure = cat("rank ", rank, ": ", comm::text_of(fabric, failure, rank));
  const auto is = [&](Cause cause) { return outcome.own_cause == cause ? 1 : 0; };
  const auto sums = comm::counts_over_ranks(fabric, {is(Cause::disk), is(Cause::other)});
  outcome.cause = sums[1] > 0 ? Cause::other : sums[0] > 0 ? Cause::disk : Cause::bytes;
  return outcome;
}

/// All ranks throw of the same cause, those that met it their own exception.
[[noreturn]] void rethrow(const Outcome& outcome, const os::Path& path) {
  const bool readable = outcome.cause == Cause::other;
  if (outcome.own && (outcome.own_cause == Cause::other) == readable) std::rethrow_exception(outcome.own);
  const std::string text = cat(path.native(), " could not be loaded on all ranks: ", outcome.failure);
  if (!readable) throw Corruption("load", text);
  throw InvalidArgument("load", text);
}

std::vector<os::Path> paths_told_by_rank_0(comm::Fabric& fabric, const os::Path& folder) {
  std::string found;
  std::string failure;
  if (fabric.rank() == 0) {
    try {
      for (const Committed& checkpoint : list_checkpoints(folder)) found += checkpoint.path.filename().native() + "\n";
    } catch (const IoError& error) {
      failure = error.what();
    }
  }
  failure = comm::text_of(fabric, failure, 0);
  if (!failure.empty()) throw IoError("load", cat("rank 0 could not look for checkpoints: ", failure));
  const std::string names = comm::text_of(fabric, found, 0);
  std::vector<os::Path> paths;
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = names.find('\n', begin);
    paths.push_back(folder / names.substr(begin, end - begin));
    begin = end + 1;
  }
  return paths;
}

}  // namespace

void load(const Checkpoint& checkpoint, const std::vector<Piece>& pieces) {
  const at::NoGradGuard no_grad;
  std::vector<Wanted> wanted;
  for (const Piece& piece : pieces) {
    const StoredTensor* stored = checkpoint.manifest().find(piece.name);
    auto refuse = [&](const std::string& what) {
      throw InvalidArgument("load", cat(checkpoint.path().native(), ": tensor \"", piece.name, "\" ", what));
    };
    if (stored == nullptr) {
      if (piece.optional) continue;
      refuse("is missing: it was saved from another model or optimizer");
    }
    if (stored->shape != piece.shape)
      refuse(cat("has shape ", at::IntArrayRef(stored->shape), ", here it is ", at::IntArrayRef(piece.shape)));
    if (!piece.data.is_contiguous() || piece.data.numel() != piece.elements.size()) {
      refuse(cat("is to be loaded into ", piece.data.numel(), " elements, ", piece.elements.size(), " are wanted"));
    }
    const c10::ScalarType type = scalar_type_of(stored->dtype);
    const bool same = type == piece.data.scalar_type();
    if (!same && !(at::isFloatingType(type) && at::isFloatingType(piece.data.scalar_type()))) {
      refuse(cat("has type ", to_string(stored->dtype), ", here it is ", c10::toString(piece.data.scalar_type())));
    }
    add_wanted(checkpoint, *stored, piece, wanted);
  }
  checkpoint.read(wanted);
}

std::optional<Checkpoint> load_newest(comm::Fabric& fabric, const os::Path& folder, const LoadInto& into,
                                      std::vector<os::Path>* damaged) {
  std::vector<os::Path> paths = paths_told_by_rank_0(fabric, folder);
  while (!paths.empty()) {
    Outcome outcome = attempt(fabric, paths.back(), into);
    if (outcome.checkpoint) return std::move(outcome.checkpoint);
    if (outcome.cause == Cause::bytes && damaged != nullptr) damaged->push_back(paths.back());
    if (outcome.cause == Cause::other || paths.size() == 1) rethrow(outcome, paths.back());
    if (fabric.rank() == 0) {
      log(LogLevel::warning,
          cat(paths.back().native(), " cannot be loaded, taking the checkpoint before it: ", outcome.failure));
    }
    paths.pop_back();
  }
  return std::nullopt;
}

Checkpoint load_chosen(comm::Fabric& fabric, const os::Path& path, const LoadInto& into) {
  std::vector<os::Path> inside = paths_told_by_rank_0(fabric, path);
  const os::Path chosen = inside.empty() ? path : inside.back();
  Outcome outcome = attempt(fabric, chosen, into);
  if (!outcome.checkpoint) rethrow(outcome, chosen);
  return std::move(*outcome.checkpoint);
}

}  // namespace tesserae::checkpoint
