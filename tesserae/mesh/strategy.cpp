#include "tesserae/mesh/strategy.h"

#include <algorithm>

#include "tesserae/base/error.h"
#include "tesserae/base/nearest.h"

namespace tesserae::mesh {
namespace {

/// What a degree of a preset is: 1, all ranks, or the degree that the caller names.
enum class Over { one, given, all };

struct Preset {
  std::string_view name;
  Over parameters, gradients, optimizer;
  bool free_after_forward, free_after_backward;
};

// Where P is 1 the compute parameters are never gathered, so there is nothing to free.
constexpr Preset presets[] = {
    {"NO_SHARD", Over::one, Over::one, Over::one, false, false},
    {"ZERO_1", Over::one, Over::one, Over::all, false, false},
    {"ZERO_2", Over::one, Over::all, Over::all, false, false},
    {"SHARD_GRAD_OP", Over::all, Over::all, Over::all, false, true},
    {"FULL_SHARD", Over::all, Over::all, Over::all, true, true},
    {"HYBRID_SHARD", Over::given, Over::given, Over::given, true, true},
    {"HYBRID_SHARD_ZERO2", Over::given, Over::given, Over::given, false, true},
    {"ZERO_PP", Over::given, Over::all, Over::all, true, true},
};

const Preset* find_preset(std::string_view name) {
  // FSDP marks HYBRID_SHARD_ZERO2 as private with an underscore; users copy the name as it stands there.
  if (name == "_HYBRID_SHARD_ZERO2") name.remove_prefix(1);
  const auto* const found = std::ranges::find(presets, name, &Preset::name);
  return found == std::end(presets) ? nullptr : found;
}

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
  const Preset* const found = find_preset(name);
  if (found == nullptr) {
    throw InvalidArgument("preset",
                          cat("no strategy is called '", name, "'; did you mean ", nearest(name, preset_names()), "?"));
  }
  if (found->parameters == Over::given) check_degree("preset", cat("the degree of ", found->name), degree, ranks);
  const auto degree_over = [&](Over over) { return over == Over::one ? 1 : over == Over::all ? ranks : degree; };
  return {.degrees = {degree_over(found->parameters), degree_over(found->gradients), degree_over(found->optimizer)},
          .free_after_forward = found->free_after_forward,
          .free_after_backward = found->free_after_backward};
}

Strategy from_hybrid_shard_degree(int degree, int ranks) {
  check_ranks("from_hybrid_shard_degree", ranks);
  check_degree("from_hybrid_shard_degree", "hybrid_shard_degree", degree, ranks);
  return degree == 1 ? preset("NO_SHARD", ranks) : preset("HYBRID_SHARD", ranks, degree);
}

Strategy resolve(const StrategyRequest& request, int ranks) {
  const std::string_view name = request.name.empty() ? std::string_view("FULL_SHARD") : request.name;
  if (request.degrees) {
    Strategy strategy = preset(name, ranks, ranks);  // for its lifetimes
    strategy.degrees = Layout(ranks, *request.degrees).degrees();
    return strategy;
  }
  if (request.hybrid_shard_degree > 0 && !takes_degree(name)) {
    return from_hybrid_shard_degree(request.hybrid_shard_degree, ranks);
  }
  return preset(name, ranks, request.hybrid_shard_degree);
}

Strategy with_degrees(Strategy strategy, const Degrees& degrees) {
  const bool never_freed = !strategy.free_after_forward && !strategy.free_after_backward;
  if (strategy.degrees.parameters == 1 && never_freed) {
    strategy.free_after_forward = strategy.free_after_backward = true;
  }
  strategy.degrees = degrees;
  return strategy;
}

std::string closest_preset(const Strategy& strategy, int ranks) {
  const Degrees& degrees = strategy.degrees;
  if (degrees.optimizer == 1) return "NO_SHARD";
  if (degrees.parameters == ranks) return strategy.free_after_forward ? "FULL_SHARD" : "SHARD_GRAD_OP";
  return strategy.free_after_forward ? "HYBRID_SHARD" : "HYBRID_SHARD_ZERO2";
}

bool takes_degree(std::string_view name) {
  const Preset* const found = find_preset(name);
  return found != nullptr && found->parameters == Over::given;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& p : presets) names.emplace_back(p.name);
  return names;
}

}  // namespace tesserae::mesh
