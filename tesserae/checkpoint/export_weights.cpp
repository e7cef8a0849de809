#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/weight_folder.h"
#include "tesserae/checkpoint/weights.h"
#include "tesserae/comm/agree.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/tensor/whole.h"

namespace tesserae::checkpoint {
namespace {

constexpr int largest_stretch_blocks = 64;

/// The type in the files of a tensor of type `type`.
c10::ScalarType exported(c10::ScalarType type, const ExportOptions& options) {
  if (options.dtype && !at::isFloatingType(*options.dtype)) {
    throw InvalidArgument("export_weights", cat(c10::toString(*options.dtype), " is no floating point type"));
  }
  return options.dtype && at::isFloatingType(type) ? *options.dtype : type;
}

/// The name in the files of a tensor of a checkpoint; nothing for what is no weight.
std::optional<std::string> exported_name(const std::string& name, const ExportOptions& options) {
  for (const std::string_view prefix : {"model/", "buffer/"}) {
    if (name.starts_with(prefix)) return options.names.theirs(name.substr(prefix.size()));
  }
  return std::nullopt;
}

/// Writes values, converted block by block.
void write_values(WeightFolder& folder, const at::Tensor& values, c10::ScalarType type) {
  const at::Tensor flat = values.detach().reshape({-1});
  constexpr int64_t block = 1 << 18;  // elements
  for (int64_t begin = 0; begin < flat.numel(); begin += block) {
    const at::Tensor run = flat.narrow(0, begin, std::min(block, flat.numel() - begin)).to(at::kCPU, type).contiguous();
    folder.write({static_cast<const char*>(run.const_data_ptr()), static_cast<size_t>(run.nbytes())});
  }
}

/// Writes a tensor that is stored in row-major order, as its parts come: each is contiguous in its file.
void write_stored(WeightFolder& folder, const Checkpoint& checkpoint, const StoredTensor& tensor,
                  c10::ScalarType type) {
  const c10::ScalarType stored = scalar_type_of(tensor.dtype);
  for (const Extent& extent : tensor.extents) {
    checkpoint.read({{.tensor = tensor.name, .elements = extent.elements, .take = [&](int64_t, std::string_view bytes) {
                        const auto count = static_cast<int64_t>(bytes.size() / c10::elementSize(stored));
                        write_values(folder, at::from_blob(const_cast<char*>(bytes.data()), {count}, stored), type);
                      }}});
  }
}

int64_t parts_of(const mesh::Splits& splits) {
  return int64_t{splits.first().parts} * splits.second().parts;
}

/// Writes a tensor that is stored split. A stretch of it lies in all of its parts: with a block for each part, every
/// stored block is read once, or twice where a stretch ends within it.
void write_split(WeightFolder& folder, const Checkpoint& checkpoint, const StoredTensor& tensor, c10::ScalarType type) {
  const int64_t elements = tensor.elements();
  const auto block = static_cast<int64_t>(checkpoint.manifest().block_bytes) / element_bytes(tensor.dtype);
  const int64_t stretch =
      std::min<int64_t>(elements, block * std::min<int64_t>(parts_of(tensor.split), largest_stretch_blocks));
  const at::Tensor buffer = at::empty({stretch}, scalar_type_of(tensor.dtype));
  for (int64_t begin = 0; begin < elements; begin += stretch) {
    const mesh::Range range{begin, std::min(begin + stretch, elements)};
    const at::Tensor values = buffer.narrow(0, 0, range.size());
    load(checkpoint, {{.name = tensor.name, .shape = tensor.shape, .elements = range, .data = values}});
    write_values(folder, values, type);
  }
}

/// A stable order by descending width, so that every element of the files is aligned.
template <class T, class Width>
void widest_first(std::vector<T>& list, const Width& width) {
  std::ranges::stable_sort(list, std::greater<>(), width);
}

/// What a live model has: the parameters of a flat buffer, or a buffer of a module.
struct Live {
  shard::FlatBuffer* flat = nullptr;
  std::string name;  // of what is no parameter, and its values
  at::Tensor values;

  c10::ScalarType type(const ExportOptions& options) const {
    return exported(flat != nullptr ? flat->parameter().local().scalar_type() : values.scalar_type(), options);
  }
};

/// Wide exported types first. The same on all ranks.
std::vector<Live> in_order(const shard::Engine& engine, const std::vector<std::pair<std::string, at::Tensor>>& buffers,
                           const ExportOptions& options) {
  std::vector<Live> all;
  for (shard::FlatBuffer* flat : engine.buffers()) all.push_back({.flat = flat, .name = {}, .values = {}});
  for (const auto& [name, values] : buffers) all.push_back({.name = name, .values = values});
  widest_first(all, [&](const Live& live) { return c10::elementSize(live.type(options)); });
  return all;
}

}  // namespace

void export_weights(const Checkpoint& checkpoint, const os::Path& folder, const ExportOptions& options) {
  std::vector<const StoredTensor*> stored;
  for (const StoredTensor& tensor : checkpoint.manifest().tensors) {
    if (exported_name(tensor.name, options)) stored.push_back(&tensor);
  }
  auto type_of = [&options](const StoredTensor* tensor) { return exported(scalar_type_of(tensor->dtype), options); };
  widest_first(stored, [&](const StoredTensor* tensor) { return c10::elementSize(type_of(tensor)); });
  std::vector<FileTensor> announced;
  for (const StoredTensor* tensor : stored) {
    announced.push_back({*exported_name(tensor->name, options), dtype_of(type_of(tensor)), tensor->shape});
  }
  WeightFolder files(folder, std::move(announced), options.file_bytes);
  for (const StoredTensor* tensor : stored) {
    const auto& write = tensor->split.whole() ? write_stored : write_split;
    write(files, checkpoint, *tensor, type_of(tensor));
  }
  files.finish();
}

void export_weights(shard::Sharded& sharded, const os::Path& folder, const ExportOptions& options,
                    const std::vector<std::pair<std::string, at::Tensor>>& buffers) {
  const at::NoGradGuard no_grad;
  comm::Fabric& fabric = sharded.fabric();
  sharded.engine().complete_updates();
  const auto all = in_order(sharded.engine(), buffers, options);
  std::unique_ptr<WeightFolder> files;
  std::string failure;
  comm::MeshFabric& mesh = sharded.mesh();
  // Rank 0 may fail while the others wait for it in a collective: it goes on gathering, and says so at the end.
  auto on_rank_0 = [&](const std::function<void()>& action) {
    if (fabric.rank() != 0 || !mesh.writes_unsplit() || !failure.empty()) return;
    try {
      action();
    } catch (const std::exception& caught) {
      failure = caught.what();
    }
  };
  on_rank_0([&] {
    std::vector<FileTensor> announced;
    for (const Live& live : all) {
      const Dtype dtype = dtype_of(live.type(options));
      if (live.flat == nullptr) {
        announced.push_back({options.names.theirs(live.name), dtype, live.values.sizes().vec()});
        continue;
      }
      for (const shard::Slot& slot : live.flat->flat().slots()) {
        announced.push_back({options.names.theirs(slot.names.front()), dtype, slot.whole});
      }
    }
    files = std::make_unique<WeightFolder>(folder, std::move(announced), options.file_bytes);
  });
  for (const Live& live : all) {
    if (live.flat == nullptr) {
      on_rank_0([&] { write_values(*files, live.values, live.type(options)); });
      continue;
    }
    const at::Tensor whole = live.flat->parameter().whole_values(live.flat->parameter().local());
    for (const shard::Slot& slot : live.flat->flat().slots()) {
      // The first that hold each part go on: they meet in whole_of, which is collective over the axes of the split.
      if (live.flat->flat().rank() != 0) break;
      at::Tensor values = whole.narrow(0, slot.begin, slot.elements);
      if (!slot.split.whole()) values = tensor::whole_of(values.view(slot.shape), slot.split, slot.whole, mesh);
      on_rank_0([&] { write_values(*files, values, live.type(options)); });
    }
  }
  fabric.everyone().require_intact();  // before what was gathered from a lost rank gets its name
  on_rank_0([&] { files->finish(); });
  failure = comm::text_of(fabric, failure, 0);
  const bool failed = shard::on_any_tensor_rank(mesh, !failure.empty());
  if (!failure.empty()) throw IoError("export_weights", cat("rank 0: ", failure));
  if (failed) throw IoError("export_weights", "the rank that writes has failed; its error says why");
}

}  // namespace tesserae::checkpoint
