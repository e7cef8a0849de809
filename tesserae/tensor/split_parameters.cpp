#include "tesserae/tensor/split_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>

#include "tesserae/base/error.h"

namespace tesserae::tensor {
namespace {

at::Tensor cut(const at::Tensor& whole, const mesh::Split& split) {
  if (split.whole()) return whole.contiguous();
  const std::vector<int64_t> shape = mesh::part_shape(whole.sizes().vec(), split);
  const int64_t size = whole.size(split.dim);
  const int64_t run = shape[static_cast<size_t>(split.dim)] / split.blocks;
  if (split.blocks == 1) {
    // Runs that were rounded up end with padding, in the last parts.
    const int64_t begin = std::min(split.index * run, size);
    const int64_t end = std::min(begin + run, size);
    at::Tensor part = whole.new_zeros(shape);
    part.narrow(split.dim, 0, end - begin).copy_(whole.narrow(split.dim, begin, end - begin));
    return part;
  }
  std::vector<at::Tensor> runs;
  const int64_t block = size / split.blocks;
  for (int64_t i = 0; i < split.blocks; ++i) {
    runs.push_back(whole.narrow(split.dim, i * block + split.index * run, run));
  }
  return at::cat(runs, split.dim).contiguous();
}

}  // namespace

at::Tensor part_of(const at::Tensor& whole, const mesh::Splits& splits) {
  mesh::part_shape(whole.sizes().vec(), splits);  // throws where two do not go together
  return cut(cut(whole, splits.first()), splits.second());
}

void fill_parameters(torch::nn::Module& root,
                     const std::function<void(const std::string& name, at::Tensor& parameter)>& fill) {
  const at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto fill_own = [&](torch::nn::Module& module, const std::string& prefix) {
    std::vector<SplitParameter> splits;
    if (const auto* split = dynamic_cast<const SplitParameters*>(&module)) splits = split->split_parameters();
    for (auto& own : module.named_parameters(/*recurse=*/false)) {
      if (!seen.insert(own.value().unsafeGetTensorImpl()).second) continue;
      const auto found = std::ranges::find(splits, own.key(), &SplitParameter::name);
      if (found == splits.end() || found->split.whole()) {
        fill(prefix + own.key(), own.value());
        continue;
      }
      at::Tensor whole = at::empty(found->whole, own.value().options().requires_grad(false));
      fill(prefix + own.key(), whole);
      own.value().copy_(part_of(whole, found->split));
    }
  };
  // The root may be filled in its own constructor, when nobody shares it yet.
  fill_own(root, "");
  for (const auto& item : root.named_modules("", /*include_self=*/false)) fill_own(*item.value(), item.key() + ".");
}

}  // namespace tesserae::tensor
