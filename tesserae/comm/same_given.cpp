#include "tesserae/comm/same_given.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

namespace tesserae::comm {
namespace {

/// The same for equal tensors, and another for those that differ in an element or the order of elements.
int64_t sum_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().reshape({-1});
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {  // such a batch may be large: as it lies
    const at::Tensor numbers = at::isComplexType(tensor.scalar_type()) ? at::view_as_real(flat).reshape({-1}) : flat;
    return numbers.sum(at::kDouble).cpu().view(at::kLong).item<int64_t>();
  }
  const at::Tensor whole = flat.to(at::kCPU, at::kLong);
  return whole.mul(at::arange(1, whole.numel() + 1, whole.options())).sum().item<int64_t>();
}

}  // namespace

std::optional<GivenOther> first_given_other(Group& group, c10::Device device, const std::vector<at::Tensor>& tensors) {
  if (group.size() == 1) return std::nullopt;
  const at::Tensor all = at::zeros({group.size(), 2}, at::TensorOptions().dtype(at::kLong));
  int64_t elements = 0;
  uint64_t sum = 0;  // wraps around
  for (size_t i = 0; i < tensors.size(); ++i) {
    elements += tensors[i].numel();
    sum += (i + 1) * static_cast<uint64_t>(sum_of(tensors[i]));
  }
  all[group.rank()][0] = elements;
  all[group.rank()][1] = static_cast<int64_t>(sum);
  const at::Tensor there = all.to(device);
  group.all_gather(there);
  const at::Tensor known = group.to_host(there);
  for (int rank = 1; rank < group.size(); ++rank) {
    if (known[rank].equal(known[0])) continue;
    return GivenOther{rank, known[0][0].item<int64_t>(), known[rank][0].item<int64_t>()};
  }
  return std::nullopt;
}

}  // namespace tesserae::comm
