#include "tesserae/mesh/layout.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

std::vector<int> divisors(int value) {
  std::vector<int> low, high;
  for (int d = 1; d <= value / d; ++d) {
    if (value % d != 0) continue;
    low.push_back(d);
    if (d != value / d) high.push_back(value / d);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

int64_t distance(const Degrees& a, const Degrees& b) {
  return std::llabs(int64_t{a.parameters} - b.parameters) + std::llabs(int64_t{a.gradients} - b.gradients) +
         std::llabs(int64_t{a.optimizer} - b.optimizer);
}

/// The valid triples at the smallest distance, joined by commas.
std::string nearest_degrees(const Degrees& wanted, int ranks) {
  const std::vector<Degrees> valid = all_degrees(ranks);
  int64_t smallest = INT64_MAX;
  for (const Degrees& candidate : valid) smallest = std::min(smallest, distance(wanted, candidate));
  std::string text;
  for (const Degrees& candidate : valid) {
    if (distance(wanted, candidate) != smallest) continue;
    text += (text.empty() ? "" : ", ") + to_string(candidate);
  }
  return text;
}

/// What is wrong with `degrees`, or empty if nothing is.
std::string complaint(const Degrees& degrees, int ranks) {
  const struct {
    const char* name;
    int value;
  } chain[] = {
      {"P", degrees.parameters}, {"G", degrees.gradients}, {"O", degrees.optimizer}, {"the number of ranks N", ranks}};
  for (const auto& link : chain) {
    if (link.value < 1) return cat(link.name, "=", link.value, " is not positive");
  }
  for (int i = 0; i < 3; ++i) {
    if (chain[i + 1].value % chain[i].value == 0) continue;
    return cat(chain[i].name, "=", chain[i].value, " does not divide ", chain[i + 1].name, "=", chain[i + 1].value);
  }
  return {};
}

}  // namespace

std::string to_string(const Degrees& degrees) {
  return cat("P=", degrees.parameters, " G=", degrees.gradients, " O=", degrees.optimizer);
}

std::vector<Degrees> all_degrees(int ranks) {
  if (ranks < 1) throw InvalidArgument("all_degrees", cat("a job of ", ranks, " ranks has no layout"));
  const std::vector<int> steps = divisors(ranks);
  std::vector<Degrees> all;
  for (int p : steps) {
    for (int g : steps) {
      if (g % p != 0) continue;
      for (int o : steps) {
        if (o % g == 0) all.push_back({p, g, o});
      }
    }
  }
  return all;
}

Degrees limited(const Degrees& degrees, int ranks) {
  return {std::gcd(degrees.parameters, ranks), std::gcd(degrees.gradients, ranks), std::gcd(degrees.optimizer, ranks)};
}

Layout::Layout(int ranks, Degrees degrees) : ranks_(ranks), degrees_(degrees) {
  const std::string wrong = complaint(degrees, ranks);
  if (wrong.empty()) return;
  const std::string asked = cat(wrong, " (", to_string(degrees), " N=", ranks, "; each must divide the next)");
  if (ranks < 1) throw InvalidArgument("Layout", asked);
  throw InvalidArgument("Layout", cat(asked, "; nearest valid: ", nearest_degrees(degrees, ranks)));
}

int Layout::parameter_piece(int rank) const {
  return rank % degrees_.parameters;
}

int Layout::gradient_piece(int rank) const {
  const auto [P, G, O] = degrees_;
  return rank % P * (G / P) + rank % G / P;
}

int Layout::chunk(int rank) const {
  const auto [P, G, O] = degrees_;
  return gradient_piece(rank) * (O / G) + rank % O / G;
}

int Layout::replica(int rank) const {
  return rank / degrees_.optimizer;
}

int Layout::owner(int chunk, int replica) const {
  const auto [P, G, O] = degrees_;
  const int o = chunk % (O / G);
  const int piece = chunk / (O / G);
  const int p = piece / (G / P);
  const int g = piece % (G / P);
  return replica * O + o * G + g * P + p;
}

std::vector<int> Layout::parameter_group(int rank) const {
  const int P = degrees_.parameters;
  std::vector<int> group(P);
  for (int p = 0; p < P; ++p) group[p] = rank - rank % P + p;
  return group;
}

std::vector<int> Layout::gradient_group(int rank) const {
  const auto [P, G, O] = degrees_;
  std::vector<int> group;
  group.reserve(G);
  for (int p = 0; p < P; ++p) {
    for (int g = 0; g < G / P; ++g) group.push_back(rank - rank % G + g * P + p);
  }
  return group;
}

std::vector<int> Layout::optimizer_group(int rank) const {
  const auto [P, G, O] = degrees_;
  std::vector<int> group(O / G);
  for (int o = 0; o < O / G; ++o) group[o] = rank - rank % O + o * G + rank % G;
  return group;
}

std::vector<int> Layout::replica_group(int rank) const {
  const int O = degrees_.optimizer;
  std::vector<int> group(replicas());
  for (int k = 0; k < replicas(); ++k) group[k] = k * O + rank % O;
  return group;
}

std::vector<int> Layout::refresh_group(int rank) const {
  const auto [P, G, O] = degrees_;
  std::vector<int> group;
  group.reserve(O / P);
  for (int g = 0; g < G / P; ++g) {
    for (int o = 0; o < O / G; ++o) group.push_back(rank - rank % O + o * G + g * P + rank % P);
  }
  return group;
}

int64_t Layout::chunk_elements(int64_t elements, int64_t alignment) const {
  if (elements < 0 || alignment < 1) {
    throw InvalidArgument("Layout::chunk_elements", cat("elements=", elements, " alignment=", alignment,
                                                        ": elements must be >= 0 and the alignment >= 1"));
  }
  const int64_t O = degrees_.optimizer;
  return round_up(elements / O + (elements % O != 0), alignment);
}

}  // namespace tesserae::mesh
