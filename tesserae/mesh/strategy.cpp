#include "tesserae/mesh/strategy.h"

#include <algorithm>

#include "tesserae/base/error.h"
#include "tesserae/base/nearest.h"

namespace tesserae::mesh {
namespace {

/// What a degree of a preset is: 1, all ranks, or the degree that the caller names.
enum class Extent { one, given, all };

struct Preset {
  std::string_view name;
  Extent parameters, gradients, optimizer;
  bool free_after_forward, free_after_backward;
};

// Where P is 1 the compute parameters are never gathered, so there is nothing to free.
constexpr Preset presets[] = {
    {"NO_SHARD", Extent::one, Extent::one, Extent::one, false, false},
    {"ZERO_1", Extent::one, Extent::one, Extent::all, false, false},
    {"ZERO_2", Extent::one, Extent::all, Extent::all, false, false},
    {"SHARD_GRAD_OP", Extent::all, Extent::all, Extent::all, false, true},
    {"FULL_SHARD", Extent::all, Extent::all, Extent::all, true, true},
    {"HYBRID_SHARD", Extent::given, Extent::given, Extent::given, true, true},
    {"HYBRID_SHARD_ZERO2", Extent::given, Extent::given, Extent::given, false, true},
    {"ZERO_PP", Extent::given, Extent::all, Extent::all, true, true},
};

void check_degree(std::string_view function, std::string_view what, int degree, int ranks) {
  if (degree >= 1 && ranks % degree == 0) return;
  int below = std::clamp(degree, 1, ranks);
  int above = below;
  while (ranks % below != 0) --below;
  while (ranks % above != 0) ++above;
  const std::string close = below == above ? cat(below) : cat(below, ", ", above);
  throw InvalidArgument(function,
                        cat(what, "=", degree, " does not divide the ", ranks, " ranks; nearest valid: ", close));
}

void check_ranks(std::string_view function, int ranks) {
  if (ranks < 1) throw InvalidArgument(function, cat("a job of ", ranks, " ranks has no strategy"));
}

}  // namespace

Strategy preset(std::string_view name, int ranks, int degree) {
  check_ranks("preset", ranks);
  // FSDP marks HYBRID_SHARD_ZERO2 as private with an underscore; users copy the name as it stands there.
  const std::string_view wanted = name == "_HYBRID_SHARD_ZERO2" ? name.substr(1) : name;
  const auto* found = std::ranges::find(presets, wanted, &Preset::name);
  if (found == std::end(presets)) {
    throw InvalidArgument("preset",
                          cat("no strategy is called '", name, "'; did you mean ", nearest(name, preset_names()), "?"));
  }
  if (found->parameters == Extent::given) check_degree("preset", cat("the degree of ", found->name), degree, ranks);
  const auto extent = [&](Extent e) { return e == Extent::one ? 1 : e == Extent::all ? ranks : degree; };
  return {.degrees = {extent(found->parameters), extent(found->gradients), extent(found->optimizer)},
          .free_after_forward = found->free_after_forward,
          .free_after_backward = found->free_after_backward};
}

Strategy from_hybrid_shard_degree(int degree, int ranks) {
  check_ranks("from_hybrid_shard_degree", ranks);
  check_degree("from_hybrid_shard_degree", "hybrid_shard_degree", degree, ranks);
  return degree == 1 ? preset("NO_SHARD", ranks) : preset("HYBRID_SHARD", ranks, degree);
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& p : presets) names.emplace_back(p.name);
  return names;
}

}  // namespace tesserae::mesh
