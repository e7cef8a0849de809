#include "tesserae/mesh/mesh.h"

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

/// The divisors of `ranks` next to `degree`, below and above it.
std::string nearest_degrees(int ranks, int degree) {
  int below = 0, above = 0;
  for (int divisor = 1; divisor <= ranks; ++divisor) {
    if (ranks % divisor != 0) continue;
    if (divisor < degree) below = divisor;
    if (divisor > degree && above == 0) above = divisor;
  }
  return below == 0 ? cat(above) : above == 0 ? cat(below) : cat(below, " and ", above);
}

void require_divides(std::string_view axis, int degree, int ranks, const std::string& whose) {
  if (degree >= 1 && ranks % degree == 0) return;
  throw InvalidArgument(
      "Mesh", cat(axis == "expert" ? "an " : "a ", axis, "-parallel degree of ", degree, " does not divide the ", ranks,
                  " ranks ", whose, "; nearest valid: ", nearest_degrees(ranks, degree)));
}

}  // namespace

Mesh::Mesh(int ranks, const AxisDegrees& degrees) : ranks_(ranks), degrees_(degrees) {
  if (ranks < 1) throw InvalidArgument("Mesh", cat("a job of ", ranks, " ranks has no axes"));
  const auto& [tensor, context, expert] = degrees;
  require_divides("tensor", tensor, ranks, "of the job");
  const int state = ranks / tensor;
  const std::string left = tensor == 1 ? "of the job" : cat("that ", ranks, " ranks / tensor ", tensor, " leave");
  require_divides("context", context, state, left);
  require_divides("expert", expert, state, left);
}

Mesh::Stride Mesh::stride(Axis axis) const {
  const auto& [tensor, context, expert] = degrees_;
  const int state = ranks_ / tensor;
  switch (axis) {
    case Axis::tensor:
      return {tensor, 1};
    case Axis::context:
      return {context, tensor};
    case Axis::data:
      return {state / context, tensor * context};
    case Axis::expert:
      return {expert, tensor};
    case Axis::expert_data:
      return {state / expert, tensor * expert};
  }
  throw InvalidArgument("Mesh", cat("there is no axis ", static_cast<int>(axis)));
}

int Mesh::degree(AxisSet axes) const {
  int product = 1;
  for (const Axis axis : axes.list()) product *= stride(axis).degree;
  return product;
}

int Mesh::index(AxisSet axes, int rank) const {
  if (rank < 0 || rank >= ranks_) throw InvalidArgument("Mesh", cat("rank ", rank, " of a job of ", ranks_, " ranks"));
  int index = 0, inner = 1;
  for (const Axis axis : axes.list()) {
    const auto [degree, step] = stride(axis);
    index += rank / step % degree * inner;
    inner *= degree;
  }
  return index;
}

std::vector<int> Mesh::members(AxisSet axes, int rank) const {
  std::vector<int> members{rank};
  for (const Axis axis : axes.list()) members.front() -= index(axis, rank) * stride(axis).stride;
  for (const Axis axis : axes.list()) {
    const auto [degree, step] = stride(axis);
    const std::vector<int> inner = members;
    for (int i = 1; i < degree; ++i) {
      for (const int member : inner) members.push_back(member + i * step);
    }
  }
  return members;
}

Splits Mesh::part(const Splits& splits, int rank) const {
  auto at_rank = [this, rank](Split split) {
    if (split.whole()) return split;
    split.index = index(split.axis, rank);
    if (split.parts == degree(split.axis)) return split;
    throw InvalidArgument("Mesh", cat(to_string(split), ", but ", to_string(*this)));
  };
  return {at_rank(splits.first()), at_rank(splits.second())};
}

std::string to_string(const Mesh& mesh) {
  auto product_of = [&mesh](AxisSet axes) {
    std::string text;
    const std::vector<Axis> list = axes.list();
    for (const Axis axis : list) {
      if (mesh.degree(axis) == 1 && axis != list.back()) continue;
      text += cat(text.empty() ? "" : " x ", to_string(axis), " ", mesh.degree(axis));
    }
    return text;
  };
  std::string text = cat(mesh.ranks(), mesh.ranks() == 1 ? " rank = " : " ranks = ", product_of(axes::job));
  if (mesh.degrees().expert > 1) text += cat(" = ", product_of({Axis::tensor, Axis::expert, Axis::expert_data}));
  return text;
}

}  // namespace tesserae::mesh
