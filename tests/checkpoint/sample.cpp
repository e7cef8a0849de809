#include "tests/checkpoint/sample.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "tesserae/checkpoint/folder.h"

namespace tesserae::testing {

using checkpoint::Dtype;

std::vector<SampleTensor> sample_tensors(int64_t step) {
  std::vector<SampleTensor> tensors{
      {"model/embedding", Dtype::F32, {31, 13}, ""},
      {"model/blocks.0.weight", Dtype::BF16, {29, 7}, ""},
      {"model/blocks.0.bias", Dtype::BF16, {29}, ""},
      {"model/empty", Dtype::F32, {0, 5}, ""},
      {"optimizer/step/embedding", Dtype::F32, {}, ""},
      {"random/0/cpu", Dtype::U8, {101}, ""},
      {"model/one", Dtype::I64, {1}, ""},
  };
  std::mt19937_64 random(static_cast<uint64_t>(step) * 7919 + 17);
  for (SampleTensor& tensor : tensors) {
    int64_t bytes = checkpoint::element_bytes(tensor.dtype);
    for (const int64_t size : tensor.shape) bytes *= size;
    for (int64_t i = 0; i < bytes; ++i) tensor.bytes.push_back(static_cast<char>(random()));
  }
  return tensors;
}

std::vector<checkpoint::Source> sample_sources(const std::vector<SampleTensor>& tensors, int rank, int ranks) {
  std::vector<checkpoint::Source> sources;
  for (const SampleTensor& tensor : tensors) {
    const int64_t width = checkpoint::element_bytes(tensor.dtype);
    const int64_t elements = static_cast<int64_t>(tensor.bytes.size()) / width;
    // Runs of different lengths: the last rank has the longest.
    auto cut = [&](int r) { return elements * r * (r + 1) / (ranks * (ranks + 1)); };
    if (elements == 0 && rank != 0) continue;
    const mesh::Range run{cut(rank), cut(rank + 1)};
    if (run.empty() && elements > 0) continue;
    sources.push_back({tensor.name, tensor.dtype, tensor.shape, run, tensor.bytes.data() + run.begin * width});
  }
  return sources;
}

checkpoint::SaveJob sample_job(const SampleSave& save, int rank) {
  return {.folder = save.folder,
          .step = save.step,
          .attempt = save.attempt.empty() ? cat("test-", save.step) : save.attempt,
          .layout = mesh::Layout(save.ranks, {1, 1, save.ranks}),
          .rank = rank,
          .keep = save.keep,
          .read_back = save.read_back,
          .block_bytes = save.block_bytes,
          .deadline = save.deadline};
}

os::Path save_sample(const SampleSave& save) {
  const auto tensors = sample_tensors(save.step);
  for (int rank = save.ranks; rank-- > 0;) {
    checkpoint::write_part(sample_job(save, rank), sample_sources(tensors, rank, save.ranks));
  }
  return checkpoint::commit(sample_job(save, 0), {{"step", save.step}, {"seed", 1234}});
}

std::string difference_from_sample(const checkpoint::Checkpoint& checkpoint) {
  const auto tensors = sample_tensors(checkpoint.step());
  if (checkpoint.manifest().tensors.size() != tensors.size()) return "another number of tensors";
  if (checkpoint.manifest().training.value("step", int64_t{-1}) != checkpoint.step()) return "another training state";
  for (const SampleTensor& tensor : tensors) {
    const checkpoint::StoredTensor* stored = checkpoint.manifest().find(tensor.name);
    if (stored == nullptr || stored->shape != tensor.shape || stored->dtype != tensor.dtype) return tensor.name;
    if (checkpoint.read(tensor.name) != tensor.bytes) return cat(tensor.name, " has other bytes");
  }
  return {};
}

std::vector<std::string> strays_in(const os::Path& folder) {
  std::vector<std::string> strays;
  for (const std::string& name : os::files().list(folder)) {
    if (!checkpoint::parse_committed(folder, name)) {
      strays.push_back(name);
      continue;
    }
    for (const std::string& inner : os::files().list(folder / name)) {
      if (inner != "manifest.json" && !inner.ends_with(".safetensors")) strays.push_back(name + "/" + inner);
    }
  }
  return strays;
}

}  // namespace tesserae::testing
