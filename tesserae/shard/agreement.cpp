#include "tesserae/shard/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <functional>
#include <sstream>
#include <vector>

#include "tesserae/comm/error.h"

namespace tesserae::shard {
namespace {

constexpr int64_t nobody = -1;

// Groups move tensors of the job's device.
at::Tensor integers(comm::Fabric& fabric, int64_t count) {
  return at::zeros({count}, at::TensorOptions().dtype(at::kLong).device(fabric.device()));
}

std::string broadcast_text(comm::Fabric& fabric, const std::string& text) {
  at::Tensor size = integers(fabric, 1).fill_(static_cast<int64_t>(text.size()));
  fabric.everyone().broadcast(size, 0);
  at::Tensor bytes = at::zeros({size.item<int64_t>()}, at::kByte);
  if (fabric.rank() == 0) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  at::Tensor moved = bytes.to(fabric.device());
  fabric.everyone().broadcast(moved, 0);
  bytes = moved.cpu();
  return {static_cast<const char*>(bytes.data_ptr()), static_cast<size_t>(bytes.numel())};
}

std::string first_difference(const std::string& mine, const std::string& theirs) {
  std::istringstream a(mine), b(theirs);
  std::string line_a, line_b;
  while (true) {
    const bool more_a = static_cast<bool>(std::getline(a, line_a));
    const bool more_b = static_cast<bool>(std::getline(b, line_b));
    if (!more_a) line_a = "nothing more";
    if (!more_b) line_b = "nothing more";
    if (line_a != line_b || (!more_a && !more_b)) return cat("here: ", line_a, "; on rank 0: ", line_b);
  }
}

}  // namespace

void require_agreement(comm::Fabric& fabric, const std::string& text) {
  if (fabric.size() == 1) return;
  // All places start with the own hash: a fabric that moves nothing leaves it there, and agrees with itself.
  at::Tensor hashes = integers(fabric, fabric.size()).fill_(static_cast<int64_t>(std::hash<std::string>{}(text) >> 1));
  fabric.everyone().all_gather(hashes);
  const at::Tensor all = hashes.cpu();
  const auto* values = all.const_data_ptr<int64_t>();
  int64_t different = nobody;
  for (int rank = fabric.size() - 1; rank > 0; --rank) {
    if (values[rank] != values[0]) different = rank;
  }
  if (different == nobody) return;

  const std::string reference = broadcast_text(fabric, text);
  const std::string what =
      values[fabric.rank()] == values[0]
          ? cat("rank ", different,
                " has another model or other degrees than rank 0; its own error names the parameter")
          : cat("rank ", fabric.rank(), " has another model or other degrees than rank 0. ",
                first_difference(text, reference));
  throw comm::Mismatch("shard_model", what);
}

std::vector<double> from_all_ranks(comm::Fabric& fabric, double value, comm::Label label) {
  at::Tensor values = at::zeros({fabric.size()}, at::TensorOptions().dtype(at::kDouble));
  values.mutable_data_ptr<double>()[fabric.rank()] = value;
  at::Tensor shared = values.to(fabric.device());
  if (fabric.size() > 1) fabric.everyone().all_gather(shared, label);
  values = shared.cpu();
  const double* data = values.const_data_ptr<double>();
  return {data, data + values.numel()};
}

double over_tensor_ranks(comm::Group* tensor_group, double value, comm::Reduction how, c10::Device device,
                         comm::Label label) {
  if (tensor_group == nullptr || tensor_group->size() == 1) return value;
  const at::Tensor shared = at::full({1}, value, at::TensorOptions().dtype(at::kDouble).device(device));
  tensor_group->all_reduce(shared, label, how);
  return shared.item<double>();
}

bool on_any_tensor_rank(comm::Group* tensor_group, bool flag, c10::Device device) {
  return over_tensor_ranks(tensor_group, flag ? 1 : 0, comm::Reduction::maximum, device) > 0;
}

std::string wires_of(const Options& options) {
  constexpr auto exact = comm::Wire::exact;
  if (options.parameter_wire == exact && options.gradient_wire == exact) return {};
  return cat("parameters travel as ", options.parameter_wire, ", gradients as ", options.gradient_wire, "\n");
}

}  // namespace tesserae::shard
