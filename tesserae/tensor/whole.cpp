#include "tesserae/tensor/whole.h"

#include "tesserae/base/error.h"
#include "tesserae/tensor/exchange.h"

namespace tesserae::tensor {

at::Tensor whole_of(const at::Tensor& part, const mesh::Split& split, const std::vector<int64_t>& whole,
                    const Parallel& parallel) {
  if (split.whole()) return part;
  if (part.sizes() != at::IntArrayRef(mesh::part_shape(whole, split)) || split.parts != parallel.size()) {
    throw InvalidArgument("whole_of",
                          cat("a part of shape ", part.sizes(), " on ", parallel.size(), " ranks is no part of ",
                              at::IntArrayRef(whole), " with ", mesh::to_string(split)));
  }
  // [..., blocks, run, ...]: rank i has the i-th run of every block.
  const auto dim = static_cast<size_t>(split.dim);
  std::vector<int64_t> shape = part.sizes().vec();
  shape[dim] /= split.blocks;
  shape.insert(shape.begin() + split.dim, split.blocks);
  const at::Tensor runs = put_together(part.detach().reshape(shape), split.dim + 1, parallel);
  return runs.narrow(split.dim + 1, 0, whole[dim] / split.blocks).reshape(whole).contiguous();
}

}  // namespace tesserae::tensor
