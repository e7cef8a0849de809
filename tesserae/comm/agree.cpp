#include "tesserae/comm/agree.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tesserae/base/copy.h"

namespace tesserae::comm {
namespace {

// Groups move tensors of the job's device.
template <class T>
std::vector<T> reduced(Fabric& fabric, const std::vector<T>& values, const Label& label,
                       Reduction how = Reduction::sum) {
  if (fabric.size() == 1) return values;
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, c10::CppTypeToScalarType<T>::value);
  std::ranges::copy(values, tensor.mutable_data_ptr<T>());
  const at::Tensor moved = tensor.to(fabric.device());
  fabric.everyone().all_reduce(moved, label, how);
  tensor = fabric.everyone().to_host(moved);
  const T* const results = tensor.const_data_ptr<T>();
  return {results, results + values.size()};
}

}  // namespace

std::vector<double> from_all_ranks(Fabric& fabric, double value, const Label& label) {
  at::Tensor values = at::zeros({fabric.size()}, at::kDouble);
  values.mutable_data_ptr<double>()[fabric.rank()] = value;
  const at::Tensor moved = values.to(fabric.device());
  if (fabric.size() > 1) fabric.everyone().all_gather(moved, label);
  values = fabric.size() > 1 ? fabric.everyone().to_host(moved) : moved.cpu();
  const double* data = values.const_data_ptr<double>();
  return {data, data + values.numel()};
}

std::vector<double> sums_over_ranks(Fabric& fabric, const std::vector<double>& values, const Label& label) {
  return reduced(fabric, values, label);
}

std::vector<int64_t> counts_over_ranks(Fabric& fabric, const std::vector<int64_t>& values, const Label& label) {
  return reduced(fabric, values, label);
}

std::vector<int64_t> largest_over_ranks(Fabric& fabric, const std::vector<int64_t>& values, const Label& label) {
  return reduced(fabric, values, label, Reduction::maximum);
}

double sum_over_ranks(Fabric& fabric, double value, const Label& label) {
  const auto all = from_all_ranks(fabric, value, label);
  return std::accumulate(all.begin(), all.end(), 0.0);
}

double max_over_ranks(Fabric& fabric, double value, const Label& label) {
  double most = value;
  for (const double other : from_all_ranks(fabric, value, label)) {
    if (!(other <= most)) most = other;  // also one that is not a number
    if (std::isnan(most)) break;
  }
  return most;
}

int lowest_rank_with(Fabric& fabric, bool flag) {
  std::vector<int64_t> flags(static_cast<size_t>(fabric.size()), 0);
  flags[static_cast<size_t>(fabric.rank())] = flag ? 1 : 0;
  flags = counts_over_ranks(fabric, flags);
  const auto found = std::ranges::find_if(flags, [](int64_t set) { return set != 0; });
  return found == flags.end() ? -1 : static_cast<int>(found - flags.begin());
}

std::string text_of(Fabric& fabric, const std::string& text, int root) {
  if (fabric.size() == 1) return text;
  const at::Tensor size =
      at::full({1}, static_cast<int64_t>(text.size()), at::TensorOptions().dtype(at::kLong).device(fabric.device()));
  fabric.everyone().broadcast(size, root);
  at::Tensor bytes = at::zeros({fabric.everyone().to_host(size).item<int64_t>()}, at::kByte);
  if (fabric.rank() == root) copy_memory(bytes.mutable_data_ptr(), text.data(), text.size());
  const at::Tensor moved = bytes.to(fabric.device());
  if (bytes.numel() > 0) fabric.everyone().broadcast(moved, root);
  bytes = fabric.everyone().to_host(moved);
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

}  // namespace tesserae::comm
