#include "tesserae/shard/agreement.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <vector>

#include "tesserae/comm/agree.h"
#include "tesserae/comm/error.h"

namespace tesserae::shard {
namespace {

constexpr int nobody = -1;

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
  // Exact in a double, and never zero: that is what a fabric that moves nothing leaves in the places of other ranks.
  const auto mine = static_cast<double>(std::hash<std::string>{}(text) >> 12 | 1);
  const auto values = comm::from_all_ranks(fabric, mine);
  const auto reference_value = values[0] != 0 ? values[0] : mine;
  int different = nobody;
  for (int rank = fabric.size() - 1; rank > 0; --rank) {
    const double value = values[static_cast<size_t>(rank)];
    if (value != 0 && value != reference_value) different = rank;
  }
  if (different == nobody) return;

  const std::string reference = comm::text_of(fabric, text, 0);
  const std::string what =
      mine == reference_value
          ? cat("rank ", different, " has another model or other options than rank 0; its own error names what differs")
          : cat("rank ", fabric.rank(), " has another model or other options than rank 0. ",
                first_difference(text, reference));
  throw comm::Mismatch("shard_model", what);
}

double over_tensor_ranks(comm::MeshFabric& mesh, double value, comm::Reduction how, comm::Label label) {
  std::vector<double> values{value};
  over_tensor_ranks(mesh, values, how, label);
  return values.front();
}

void over_tensor_ranks(comm::MeshFabric& mesh, std::vector<double>& values, comm::Reduction how, comm::Label label) {
  if (mesh.degree(mesh::axes::tensor) == 1) return;
  const at::Tensor shared = at::tensor(values, at::kDouble).to(mesh.job()->device());
  comm::Group& group = mesh.group(mesh::axes::tensor, comm::Traffic::control);
  group.all_reduce(shared, label, how);
  const at::Tensor sums = group.to_host(shared);
  std::copy_n(sums.const_data_ptr<double>(), values.size(), values.begin());
}

bool on_any_tensor_rank(comm::MeshFabric& mesh, bool flag) {
  return over_tensor_ranks(mesh, flag ? 1 : 0, comm::Reduction::maximum) > 0;
}

std::string text_of(const Options& options) {
  const auto name = [](const std::optional<c10::ScalarType>& dtype) {
    return std::string(dtype ? c10::toString(*dtype) : "the model's");
  };
  const Precision& precision = options.precision;
  return cat("computes in ", name(precision.parameters), ", reduces in ", name(precision.reduce), ", masters in ",
             name(precision.masters), precision.cast_inputs ? "" : ", inputs are not cast", "\naccumulation ",
             options.accumulation == Accumulation::local ? "local" : "two_hop", "\ncut by ",
             options.cut_by == CutBy::elements ? "elements" : "rows", "\nsync_module_states ",
             options.sync_module_states ? "on" : "off", "\n", wires_of(options));
}

std::string wires_of(const Options& options) {
  constexpr auto exact = comm::Wire::exact;
  if (options.parameter_wire == exact && options.gradient_wire == exact) return {};
  return cat("parameters travel as ", options.parameter_wire, ", gradients as ", options.gradient_wire, "\n");
}

}  // namespace tesserae::shard
