#include "tesserae/experts/experts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>

#include "tesserae/base/error.h"
#include "tesserae/experts/dispatch.h"
#include "tesserae/experts/grouped_linear.h"

namespace tesserae::experts {

ExpertsImpl::ExpertsImpl(const ExpertsOptions& options, const tensor::LayerOptions& layer)
    : options_(options), layer_(layer) {
  if (options_.experts < 1 || options_.width < 1 || options_.hidden < 1) {
    throw InvalidArgument("Experts", cat(options_.experts, " experts of width ", options_.width, " and hidden width ",
                                         options_.hidden, ": all must be at least 1"));
  }
  experts_of_rank(options_.experts, layer_.parallel->mesh()->degree(mesh::Axis::expert));
  tensor::size_of_part("the hidden width of experts", options_.hidden, *layer_.parallel);
  const auto stack = [&](const tensor::SplitParameter& parameter) {
    return register_parameter(parameter.name,
                              at::empty(mesh::part_shape(parameter.whole, parameter.split), layer_.tensors));
  };
  const auto parameters = split_parameters();
  gate = stack(parameters[0]);
  up = stack(parameters[1]);
  down = stack(parameters[2]);
}

at::Tensor ExpertsImpl::forward(const at::Tensor& x, const at::Tensor& counts) const {
  const at::Tensor gated = at::silu(grouped_linear(x, gate, counts)).mul(grouped_linear(x, up, counts));
  return grouped_linear(gated, down, counts);
}

std::vector<tensor::SplitParameter> ExpertsImpl::split_parameters() const {
  const auto& [experts, width, hidden] = options_;
  return {{"gate", split(1), {experts, hidden, width}},
          {"up", split(1), {experts, hidden, width}},
          {"down", split(2), {experts, width, hidden}}};
}

mesh::Splits ExpertsImpl::split(int hidden_dim) const {
  const comm::MeshFabric& mesh = *layer_.parallel->mesh();
  const mesh::Split by_expert{.dim = 0,
                              .parts = mesh.degree(mesh::Axis::expert),
                              .index = mesh.index(mesh::Axis::expert),
                              .axis = mesh::Axis::expert};
  return {by_expert, layer_.parallel->split(hidden_dim)};
}

}  // namespace tesserae::experts
