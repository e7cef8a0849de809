#include "tesserae/tensor/whole.h"

#include <ATen/ops/empty.h>

#include "tesserae/base/error.h"

namespace tesserae::tensor {

at::Tensor whole_of(const at::Tensor& part, const mesh::Split& split, const std::vector<int64_t>& whole,
                    comm::Group& group) {
  if (split.whole()) return part;
  if (part.sizes() != at::IntArrayRef(mesh::part_shape(whole, split)) || split.parts != group.size()) {
    throw InvalidArgument("whole_of",
                          cat("a part of shape ", part.sizes(), " on ", group.size(), " ranks is no part of ",
                              at::IntArrayRef(whole), " with ", mesh::to_string(split)));
  }
  // [parts, ..., blocks, run, ...]: rank i has the i-th run of every block.
  const auto dim = static_cast<size_t>(split.dim);
  std::vector<int64_t> shape = part.sizes().vec();
  shape[dim] /= split.blocks;
  shape.insert(shape.begin() + split.dim, split.blocks);
  shape.insert(shape.begin(), split.parts);
  const at::Tensor parts = at::empty(shape, part.options().requires_grad(false));
  parts[group.rank()].copy_(part.detach().reshape(at::IntArrayRef(shape).slice(1)));
  group.all_gather(parts);
  const at::Tensor runs = parts.movedim(0, split.dim + 1).flatten(split.dim + 1, split.dim + 2);
  return runs.narrow(split.dim + 1, 0, whole[dim] / split.blocks).reshape(whole).contiguous();
}

at::Tensor whole_of(const at::Tensor& part, const mesh::Splits& splits, const std::vector<int64_t>& whole,
                    comm::MeshFabric& mesh) {
  at::Tensor values = part;
  if (const mesh::Split& inner = splits.second(); !inner.whole()) {
    values = whole_of(values, inner, mesh::part_shape(whole, splits.first()),
                      mesh.group(inner.axis, comm::Traffic::control));
  }
  const mesh::Split& outer = splits.first();
  return outer.whole() ? values : whole_of(values, outer, whole, mesh.group(outer.axis, comm::Traffic::control));
}

}  // namespace tesserae::tensor
