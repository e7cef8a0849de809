#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/mesh/layout.h"

namespace tesserae::dial {

/// What memory and time of a step depend on beside the degrees. Bytes are those of one element. docs/auto.md derives
/// the formulas of this file.
struct Facts {
  std::vector<int> host_of;  ///< of each data-parallel rank, ranks of a host one after the other
  int tensor = 1;            ///< tensor-parallel ranks for each of them: as many times a rank's memory is in its place
  int64_t parameters = 0;    ///< Psi: elements of the model; with tensor-parallel ranks, of the parts of one of them
  int64_t root_unit = 0;     ///< elements of the root, which is gathered and reduced beside the others
  int64_t largest_unit = 0;  ///< elements of the largest inner unit
  int units = 1;             ///< with the root
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

  int ranks() const { return static_cast<int>(host_of.size()); }
  bool operator==(const Facts&) const = default;
};

/// What carries bytes, for each rank while all ranks use it. Bytes and seconds.
struct Links {
  double inside = 5e9;                                   ///< bytes/s that a rank sends to ranks of its host
  double between = 1e9;                                  ///< the same to other hosts
  double inside_latency = 2e-5, between_latency = 1e-4;  ///< of one collective
  double memory = 1e10;                                  ///< bytes/s that a rank reads or writes in its own memory

  bool operator==(const Links&) const = default;
};

/// Bytes of one rank between steps and in flight.
struct RankMemory {
  double pieces = 0;      ///< c Psi / P; 0 where the master is the piece
  double masters = 0;     ///< m Psi / O
  double state = 0;       ///< s Psi / O
  double gradients = 0;   ///< m Psi / O, and g Psi / G of an accumulation in two hops, g Psi of one on the rank
  double gathered = 0;    ///< buffers of gathered units that are this rank's own
  double reductions = 0;  ///< buffers of gradients being reduced

  double total() const { return pieces + masters + state + gradients + gathered + reductions; }
};

/// The layout-dependent memory of `rank`. What it shares with others (Facts::shared_copy) is not in it.
RankMemory memory_of_rank(const Facts& facts, const mesh::Degrees& degrees, int rank);

/// The layout-dependent bytes of the fullest place: a host with all that its ranks hold and share, or a device.
double memory_of(const Facts& facts, const mesh::Degrees& degrees);

/// Bytes that a rank sends in a step, by the hop that sends them, and how often; and over which link.
struct Traffic {
  struct Hop {
    double bytes = 0;
    double calls = 0;
    bool crosses = false;  ///< some group of this hop spans hosts
    double across = 0;     ///< of the bytes: to other hosts; the others stay inside
  };
  Hop gather, first_hop, second_hop, third_hop, refresh;
};
Traffic traffic_of(const Facts& facts, const mesh::Degrees& degrees);

/// Seconds of a step that depend on the degrees if nothing hides them: all hops over their slowest links, and the
/// optimizer's pass over its chunk.
double moving_seconds(const Facts& facts, const Links& links, const mesh::Degrees& degrees);

/// The degrees to begin with, before anything was measured: those with the fewest moving_seconds among all that leave
/// `headroom` of `place` bytes free if half of the rest goes to activations; if there are none, those that need least.
/// `available`: what is free of the place before the model is there.
struct FirstChoice {
  mesh::Degrees degrees;
  std::string why;
};
FirstChoice first_choice(const Facts& facts, const Links& links, double place, double available, double headroom);

}  // namespace tesserae::dial
