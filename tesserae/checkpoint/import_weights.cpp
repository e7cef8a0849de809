#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/placement.h"
#include "tesserae/checkpoint/weights.h"
#include "tesserae/checkpoint/writer.h"
#include "tesserae/comm/agree.h"
#include "tesserae/os/random_name.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::checkpoint {
namespace {

constexpr const char* import_function = "import_weights";
constexpr int64_t block_bytes = 1 << 20;

/// For each parameter of the model, by its first name: the tensor of the files that gives its values.
std::map<std::string, std::string> match_names(const WeightFiles& files, shard::Engine& engine,
                                               const ImportOptions& options) {
  std::map<std::string, std::string> theirs;  // by our name
  for (const auto& [name, tensor] : files.tensors()) {
    const auto [found, fresh] = theirs.emplace(options.names.ours(name), name);
    if (fresh) continue;
    throw InvalidArgument(import_function,
                          cat("\"", found->second, "\" and \"", name, "\" both stand for \"", found->first, "\""));
  }
  std::map<std::string, std::string> source;
  std::set<std::string> known;
  const auto match = [&](const shard::Slot& slot) {
    known.insert(slot.names.begin(), slot.names.end());
    const auto name = std::ranges::find_if(slot.names, [&](const auto& each) { return theirs.contains(each); });
    if (name == slot.names.end()) {
      if (std::ranges::count(options.may_miss, slot.names.front()) > 0) return;
      throw InvalidArgument(import_function, cat("the files have no tensor for parameter \"", slot.names.front(),
                                                 "\"; give a name map, or name it in may_miss"));
    }
    const std::string& found = theirs.at(*name);
    if (files.tensors().at(found).shape != slot.whole) {
      throw InvalidArgument(import_function,
                            cat("tensor \"", found, "\" has shape ", at::IntArrayRef(files.tensors().at(found).shape),
                                ", parameter \"", *name, "\" has ", at::IntArrayRef(slot.whole)));
    }
    source.emplace(slot.names.front(), found);
  };
  for (const shard::FlatBuffer* buffer : engine.buffers()) {
    for (const shard::Slot& slot : buffer->flat().slots()) match(slot);
  }
  for (const auto& [ours, name] : theirs) {
    if (known.contains(ours) || options.ignore_unknown) continue;
    throw InvalidArgument(import_function, cat("the model has no parameter \"", ours, "\" for tensor \"", name,
                                               "\"; give a name map, or set ignore_unknown"));
  }
  return source;
}

void read_piece(const WeightFiles& files, const std::string& name, const Piece& piece, std::vector<char>& buffer) {
  const FileTensor& tensor = files.tensors().at(name);
  const c10::ScalarType type = scalar_type_of(tensor.dtype);
  if (type != piece.data.scalar_type() && !(at::isFloatingType(type) && at::isFloatingType(piece.data.scalar_type()))) {
    throw InvalidArgument(import_function, cat("tensor \"", name, "\" has type ", to_string(tensor.dtype)));
  }
  const int64_t width = element_bytes(tensor.dtype);
  const Placement placement(piece, {}, type);  // files have whole tensors
  buffer.resize(block_bytes);
  for (const mesh::Range& run : placement.runs(block_bytes / width)) {
    for (int64_t at = run.begin; at < run.end;) {
      const int64_t count = std::min(block_bytes / width, run.end - at);
      files.read(name, static_cast<uint64_t>(at * width), {buffer.data(), static_cast<size_t>(count * width)});
      placement.put(at, {buffer.data(), static_cast<size_t>(count * width)});
      at += count;
    }
  }
}

}  // namespace

void import_weights(const WeightFiles& files, shard::Sharded& sharded, const ImportOptions& options) {
  const at::NoGradGuard no_grad;
  std::string failure;
  std::exception_ptr own;
  try {
    const auto source = match_names(files, sharded.engine(), options);
    std::vector<char> buffer;
    for (const Piece& piece : model_pieces(sharded, nullptr)) {
      const auto found = source.find(piece.name.substr(std::string_view("model/").size()));
      if (found != source.end()) read_piece(files, found->second, piece, buffer);
    }
  } catch (const std::exception& caught) {
    failure = caught.what();
    own = std::current_exception();
  }
  comm::Fabric& fabric = sharded.fabric();
  const int rank = comm::lowest_rank_with(fabric, !failure.empty());
  const bool failed = shard::on_any_tensor_rank(sharded.mesh(), rank >= 0);
  if (rank >= 0) {
    failure = comm::text_of(fabric, failure, rank);
    if (own) std::rethrow_exception(own);
    throw IoError(import_function, cat("rank ", rank, ": ", failure));
  }
  if (failed) throw IoError(import_function, "a rank of another tensor-parallel index has failed; its error says why");
  publish_model(sharded);
}

os::Path checkpoint_from_weights(const WeightFiles& files, const os::Path& folder, const NameMap& names) {
  std::vector<Source> sources;
  for (const auto& [name, tensor] : files.tensors()) {
    sources.push_back(
        {.name = cat("model/", names.ours(name)),
         .dtype = tensor.dtype,
         .shape = tensor.shape,
         .elements = {0, tensor.elements()},
         .fill = [&files, name = name](uint64_t offset, std::span<char> bytes) { files.read(name, offset, bytes); }});
  }
  const SaveJob job{.folder = folder, .attempt = os::random_name()};
  write_part(job, sources);
  return commit(job, nlohmann::json::object());
}

}  // namespace tesserae::checkpoint
