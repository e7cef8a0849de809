#include "tests/parity/cases.h"

#include <array>
#include <set>

#include "tesserae/base/error.h"

namespace tesserae::testing {
namespace {

std::vector<mesh::Strategy> strategies(int ranks) {
  std::vector<mesh::Strategy> list;
  for (const auto& degrees : mesh::all_degrees(ranks)) {
    list.push_back({degrees, true, true});
    list.push_back({degrees, false, true});
    list.push_back({degrees, false, false});
  }
  return list;
}

// The values of a case's choices as (choice, value), for counting pairs.
using Value = std::pair<int, int>;
std::array<Value, 7> values(const ParityCase& c) {
  const auto& d = c.strategy.degrees;
  const int lifetime = c.strategy.free_after_forward ? 0 : c.strategy.free_after_backward ? 1 : 2;
  return {{{0, d.parameters * 10000 + d.gradients * 100 + d.optimizer},
           {1, lifetime},
           {2, c.bf16},
           {3, c.accumulation},
           {4, c.clip},
           {5, c.checkpoint},
           {6, c.rows}}};
}

using Pairs = std::set<std::pair<Value, Value>>;
Pairs pairs_of(const ParityCase& c) {
  Pairs pairs;
  const auto all = values(c);
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t k = i + 1; k < all.size(); ++k) pairs.insert({all[i], all[k]});
  }
  return pairs;
}

std::vector<ParityCase> choices(const mesh::Strategy& strategy, bool bf16) {
  std::vector<ParityCase> list;
  for (int accumulation = 0; accumulation < 3; ++accumulation) {
    for (const bool clip : {false, true}) {
      for (const bool checkpoint : {false, true}) {
        for (const bool rows : {false, true}) {
          list.push_back({strategy, bf16, accumulation, clip, checkpoint, rows});
        }
      }
    }
  }
  return list;
}

}  // namespace

std::string to_string(const ParityCase& c) {
  static const char* const accumulations[] = {"", ", accumulates locally", ", accumulates in two hops"};
  return cat(mesh::to_string(c.strategy.degrees),
             c.strategy.free_after_forward    ? ", frees after forward"
             : c.strategy.free_after_backward ? ", frees after backward"
                                              : ", never frees",
             c.bf16 ? ", bf16" : ", fp32", accumulations[c.accumulation], c.clip ? ", clips" : "",
             c.checkpoint ? ", checkpoints" : "", c.rows ? ", by rows" : "");
}

std::vector<ParityCase> pairwise_cases(int ranks) {
  std::vector<ParityCase> chosen;
  Pairs covered;
  for (const bool bf16 : {false, true}) {
    for (const auto& strategy : strategies(ranks)) {
      // Greedy: of all ways to fill the case up, the one that brings most new pairs.
      const auto list = choices(strategy, bf16);
      size_t best = 0, most = 0;
      for (size_t i = 0; i < list.size(); ++i) {
        size_t fresh = 0;
        for (const auto& pair : pairs_of(list[i])) fresh += !covered.contains(pair);
        if (fresh > most) {
          most = fresh;
          best = i;
        }
      }
      chosen.push_back(list[best]);
      covered.merge(pairs_of(list[best]));
    }
  }
  // Greedy may leave pairs out: that would be a wrong promise, so it is checked.
  Pairs all;
  for (const auto& c : all_cases(ranks)) all.merge(pairs_of(c));
  if (covered != all) throw Error("pairwise_cases", cat("covers ", covered.size(), " of ", all.size(), " pairs"));
  return chosen;
}

std::vector<ParityCase> all_cases(int ranks) {
  std::vector<ParityCase> list;
  for (const bool bf16 : {false, true}) {
    for (const auto& strategy : strategies(ranks)) {
      for (const auto& c : choices(strategy, bf16)) list.push_back(c);
    }
  }
  return list;
}

}  // namespace tesserae::testing
