#include "tesserae/shard/split_parameters.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "tesserae/base/error.h"

namespace tesserae::shard {

at::Tensor part_of(const at::Tensor& whole, const mesh::Split& split) {
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

}  // namespace tesserae::shard
