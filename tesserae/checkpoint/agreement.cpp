#include "tesserae/checkpoint/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

namespace tesserae::checkpoint {
namespace {

// Groups move tensors of the job's device.
at::Tensor on_device(const comm::Fabric& fabric, const at::Tensor& tensor) {
  return tensor.to(fabric.device());
}

}  // namespace

std::vector<int64_t> sum_over_ranks(comm::Fabric& fabric, const std::vector<int64_t>& values) {
  if (fabric.size() == 1) return values;
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::ranges::copy(values, tensor.mutable_data_ptr<int64_t>());
  const at::Tensor moved = on_device(fabric, tensor);
  fabric.everyone().all_reduce(moved);
  tensor = moved.cpu();
  const auto* sums = tensor.const_data_ptr<int64_t>();
  return {sums, sums + values.size()};
}

int lowest_rank_with(comm::Fabric& fabric, bool flag) {
  std::vector<int64_t> flags(static_cast<size_t>(fabric.size()), 0);
  flags[static_cast<size_t>(fabric.rank())] = flag ? 1 : 0;
  flags = sum_over_ranks(fabric, flags);
  const auto found = std::ranges::find_if(flags, [](int64_t set) { return set != 0; });
  return found == flags.end() ? -1 : static_cast<int>(found - flags.begin());
}

std::string text_of(comm::Fabric& fabric, const std::string& text, int root) {
  if (fabric.size() == 1) return text;
  at::Tensor size = at::zeros({1}, at::kLong).fill_(static_cast<int64_t>(text.size()));
  size = on_device(fabric, size);
  fabric.everyone().broadcast(size, root);
  at::Tensor bytes = at::zeros({size.cpu().item<int64_t>()}, at::kByte);
  if (fabric.rank() == root) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  const at::Tensor moved = on_device(fabric, bytes);
  if (bytes.numel() > 0) fabric.everyone().broadcast(moved, root);
  bytes = moved.cpu();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

}  // namespace tesserae::checkpoint
