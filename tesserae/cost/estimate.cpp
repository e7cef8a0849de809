#include "tesserae/cost/estimate.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/cost/memory.h"
#include "tesserae/cost/step_time.h"

namespace tesserae::cost {
namespace {

// Half of the memory is for what nobody knows before the first step: activations.
constexpr double share_for_state = 0.5;

std::string in_words(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, bytes < 1e9 ? "%.1f MB" : "%.1f GB", bytes / (bytes < 1e9 ? 1e6 : 1e9));
  return text;
}

using offload::Tier;

// In the order in which a step misses it least: state and masters are touched once, parameters three times.
constexpr offload::Tiers ever_less[] = {{.optimizer = Tier::disk},
                                        {.gradients = Tier::disk, .optimizer = Tier::disk},
                                        {.parameters = Tier::disk, .gradients = Tier::disk, .optimizer = Tier::disk}};

FirstChoice on_disk(Facts facts, double room) {
  const mesh::Degrees all{facts.ranks(), facts.ranks(), facts.ranks()};
  const double in_memory = memory_of(facts, all);
  double left = in_memory;
  for (const offload::Tiers& tiers : ever_less) {
    facts.tiers = tiers;
    left = memory_of(facts, all);
    if (left <= room) break;
  }
  return {
      all, facts.tiers,
      cat("needs ", in_words(in_memory), " in memory even at the highest degree, where ", in_words(std::max(room, 0.0)),
          " are left beside activations; ", to_string(facts.tiers), ": ", in_words(left))};
}

}  // namespace

double moving_seconds(const Facts& facts, const Links& links, const mesh::Degrees& degrees) {
  Machine machine;
  machine.links = links;
  const MovingTime time = moving_time(facts, machine, degrees);
  return time.hops() + time.optimizer;
}

FirstChoice first_choice(const Facts& facts, const Links& links, double place, double available, double headroom,
                         std::optional<double> activations) {
  const double rest = available - headroom * place - activations.value_or(0);
  const double room = std::min(rest, (available - headroom * place) * share_for_state);
  struct Candidate {
    mesh::Degrees degrees;
    double memory, seconds;
  };
  const Candidate* fastest = nullptr;
  const Candidate* smallest = nullptr;
  std::vector<Candidate> candidates;
  for (const mesh::Degrees& degrees : mesh::all_degrees(facts.ranks())) {
    candidates.push_back({degrees, memory_of(facts, degrees), moving_seconds(facts, links, degrees)});
  }
  for (const Candidate& candidate : candidates) {
    if (smallest == nullptr || candidate.memory < smallest->memory) smallest = &candidate;
    if (candidate.memory > room) continue;
    if (fastest == nullptr || candidate.seconds < fastest->seconds) fastest = &candidate;
  }
  if (activations && smallest->memory > rest) return on_disk(facts, rest);
  if (fastest == nullptr) {
    return {smallest->degrees, facts.tiers,
            cat("needs least: ", in_words(smallest->memory), " of ", in_words(room),
                " that may be used before activations are known")};
  }
  return {fastest->degrees, facts.tiers,
          cat("estimated to be fastest of what fits: ", in_words(fastest->memory), " of ", in_words(room),
              " that may be used before activations are known")};
}

}  // namespace tesserae::cost
