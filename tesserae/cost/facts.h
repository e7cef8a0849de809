#pragma once

#include <cstdint>
#include <vector>

#include "tesserae/mesh/layout.h"
#include "tesserae/offload/tier.h"

namespace tesserae::cost {

/// What memory and time of a step depend on beside the degrees. Bytes are those of one element. docs/auto.md derives
/// the formulas that use them (memory.h, traffic.h, estimate.h).
struct Facts {
  std::vector<int> host_of;  ///< of each data-parallel rank, ranks of a host one after the other
  int tensor = 1;            ///< tensor-parallel ranks for each of them: as many times a rank's memory is in its place
  int64_t parameters = 0;    ///< Psi: elements of the model; with tensor-parallel ranks, of the parts of one of them
  double trained = 1;        ///< share of them that has gradients and optimizer state
  int64_t root_unit = 0;     ///< elements of the root, which is gathered and reduced beside the others
  int64_t largest_unit = 0;  ///< elements of the largest inner unit
  double trained_root = 1;   ///< share of the root's that has gradients
  double trained_unit = 1;   ///< elements with gradients of the inner unit that has most of these, over `largest_unit`.
                             ///< Experts count as trained
  int units = 1;             ///< with the root
  /// Experts, which are units inside these: each of `degree` parts of them is sharded over N / degree ranks, on which
  /// every (P, G, O) is what mesh::limited says.
  struct Experts {
    int degree = 1;          ///< E
    int64_t parameters = 0;  ///< of one rank's part, not among those above; 0: there are none
    int64_t unit = 0;        ///< of them, of the largest
    int units = 0;
    bool operator==(const Experts&) const = default;
  } experts = {};
  int compute_bytes = 4, reduce_bytes = 4, master_bytes = 4;
  double state_bytes = 8;  ///< of the optimizer's state: AdamW 2 * master_bytes
  int gathers_at_once = 2, reductions_at_once = 2;
  bool free_after_forward = true, free_after_backward = true;
  int micro_batches = 1;
  bool two_hop = false;           ///< with micro_batches > 1: reduced over G at each of them, else kept whole
  bool ranks_share_place = true;  ///< ranks of a host use the same memory; false: each has its device's
  bool shared_copy = false;       ///< ranks of P on one host share what is gathered
  bool two_levels = false;  ///< collectives over hosts cross once for each element (comm/transports/two_level_group.h);
                            ///< ranks of a host share the crossing evenly
  offload::Tiers tiers = {};  ///< what lies on a disk takes no memory but a window

  int ranks() const { return static_cast<int>(host_of.size()); }
  bool operator==(const Facts&) const = default;
};

/// 1 where there is nothing to have a part of.
inline double share_of(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 1;
}
/// The same of the ranks with one expert index, 0 <= `index` < E, and their experts alone: as facts of a model without
/// a root, over N / E ranks. Rank r of the N is its rank r / E for the index r % E.
Facts experts_of(const Facts& facts, int index);
/// Elements of masters that a rank has.
double owned_elements(const Facts& facts, const mesh::Degrees& degrees);

/// Whether some of these ranks, which follow each other, are on different hosts.
inline bool spans_hosts(const Facts& facts, int first, int last) {
  return facts.host_of[static_cast<size_t>(first)] != facts.host_of[static_cast<size_t>(last)];
}
/// Whether the ranks of P with which `rank` gathers see one copy: what is gathered needs no memory of their own, and no
/// message.
bool shares_gathered(const Facts& facts, const mesh::Degrees& degrees, int rank);

}  // namespace tesserae::cost
