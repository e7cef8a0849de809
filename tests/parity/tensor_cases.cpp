#include "tests/parity/tensor_cases.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::testing {
namespace {

// The values of a case's choices as (choice, value), for counting pairs.
using Value = std::pair<int, int>;
using Pairs = std::set<std::pair<Value, Value>>;

Pairs pairs_of(const Case& c) {
  const std::array<Value, 2> degrees = {{{0, c.tensor_degree}, {11, c.context_degree}}};
  const std::array<Value, 2> three = {{{1, c.strategy.free_after_forward    ? 0
                                           : c.strategy.free_after_backward ? 1
                                                                            : 2},
                                       {2, c.accumulation}}};
  const std::array<Value, 8> two = {{{3, c.sequence},
                                     {4, c.bf16},
                                     {5, c.clip},
                                     {6, c.checkpoint},
                                     {7, c.tied},
                                     {8, c.frozen},
                                     {9, c.turned},
                                     {10, c.adamw}}};
  Pairs pairs = {{three[0], three[1]}};
  for (size_t i = 0; i < two.size(); ++i) {
    // Not with three values: the largest degrees have two cases.
    for (const Value& degree : degrees) pairs.insert({degree, two[i]});
    for (const Value& value : three) pairs.insert({value, two[i]});
    for (size_t k = i + 1; k < two.size(); ++k) pairs.insert({two[i], two[k]});
  }
  return pairs;
}

struct Axes {
  int tensor, context;
};

/// The largest degrees first: they have the fewest cases.
std::vector<Axes> all_axes(int ranks) {
  std::vector<Axes> list;
  for (int tensor = ranks; tensor >= 1; tensor /= 2) {
    for (int context = ranks / tensor; context >= 1; context /= 2) list.push_back({tensor, context});
  }
  return list;
}

/// Sequence parallelism is about tensor ranks.
std::vector<bool> sequences(const Axes& axes) {
  return axes.tensor > 1 ? std::vector<bool>{false, true} : std::vector<bool>{false};
}

/// All ways to fill up a case of which these three are given.
std::vector<Case> choices(const Axes& axes, const mesh::Degrees& degrees, bool sequence) {
  constexpr bool either[] = {false, true};
  std::vector<Case> list;
  for (int lifetime = 0; lifetime < 3; ++lifetime) {
    for (int accumulation = 0; accumulation < 3; ++accumulation) {
      for (int bits = 0; bits < 1 << 7; ++bits) {
        const auto bit = [&](int i) { return either[bits >> i & 1]; };
        list.push_back({.tensor_degree = axes.tensor,
                        .context_degree = axes.context,
                        .strategy = {degrees, lifetime == 0, lifetime != 2},
                        .sequence = sequence,
                        .bf16 = bit(0),
                        .accumulation = accumulation,
                        .clip = bit(1),
                        .checkpoint = bit(2),
                        .tied = bit(3),
                        .frozen = bit(4),
                        .turned = bit(5),
                        .adamw = bit(6)});
      }
    }
  }
  return list;
}

}  // namespace

std::string to_string(const Case& c) {
  return cat("T=", c.tensor_degree, " C=", c.context_degree, " ", context::to_string(c.method),
             c.packed ? " packed" : "", c.window > 0 ? " window" : "", " ", mesh::to_string(c.strategy.degrees),
             c.sequence ? " sequence" : "", c.bf16 ? " bf16" : "", " accumulation ", c.accumulation,
             c.clip ? " clips" : "", c.checkpoint ? " checkpoints" : "", c.tied ? " tied" : "",
             c.frozen ? " frozen" : "", c.turned ? " turned" : "", c.adamw ? " adamw" : "");
}

std::vector<Case> cases(int ranks) {
  std::vector<Case> list;
  Pairs all, ever, covered;
  for (const Axes& axes : all_axes(ranks)) {
    for (const bool sequence : sequences(axes)) {
      for (const auto& c : choices(axes, {}, sequence)) all.merge(pairs_of(c));
    }
  }
  constexpr std::array methods = {context::Method::automatic, context::Method::p2p, context::Method::all_gather,
                                  context::Method::all_to_all};
  size_t turn = 0;
  for (const Axes& axes : all_axes(ranks)) {
    for (const auto& degrees : mesh::all_degrees(ranks / axes.tensor)) {
      for (const bool sequence : sequences(axes)) {
        const bool complete = ever == all;
        // Greedy: of all ways to fill the case up, the one that brings most new pairs.
        const auto ways = choices(axes, degrees, sequence);
        const Case* best = nullptr;
        size_t most = 0;
        for (const auto& c : ways) {
          if (complete && c.bf16) continue;
          const Pairs pairs = pairs_of(c);
          const auto fresh = static_cast<size_t>(
              std::ranges::count_if(pairs, [&](const auto& pair) { return !covered.contains(pair); }));
          if (best == nullptr || fresh > most) {
            best = &c;
            most = fresh;
          }
        }
        list.push_back(*best);
        if (axes.context > 1) list.back().method = methods[turn % methods.size()];
        list.back().packed = turn % 3 == 1;
        list.back().window = turn % 5 == 2 ? 4 : 0;
        ++turn;
        covered.merge(pairs_of(*best));
        if (complete) continue;
        ever.merge(pairs_of(*best));
        if (ever == all) covered.clear();
      }
    }
  }
  // Greedy may leave pairs out: that would be a wrong promise, so it is checked.
  if (ever != all) throw Error("cases", cat("cover ", ever.size(), " of ", all.size(), " pairs"));
  return list;
}

}  // namespace tesserae::testing
