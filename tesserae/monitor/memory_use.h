#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "tesserae/shard/engine.h"

namespace tesserae::monitor {

/// What a rank's memory is taken by between two steps, in bytes. `program`: what was there before the first step, the
/// interpreter, libraries, data; `other`: what has come since and nobody counts, activations and freed memory that
/// torch keeps for later. Their sum is what the rank holds: on the host its proportional set (shared pages divided by
/// those that share them), on a device what is allocated there.
enum class Holds : uint8_t { parameters, gradients, masters, optimizer, buffers, shared, program, other };
inline constexpr size_t holds_count = 8;
constexpr std::array<std::string_view, holds_count> holds_names = {"parameters", "gradients", "masters", "optimizer",
                                                                   "buffers",    "shared",    "program", "other"};

struct MemoryUse {
  std::array<double, holds_count> bytes{};
  double peak = 0;              ///< the most that was held, within steps
  std::optional<double> limit;  ///< of this rank: its part of the control group's, or its device

  double& of(Holds what) { return bytes[static_cast<size_t>(what)]; }
};

/// Adds what `engine` holds: parameters, gradients, masters, buffers, and this rank's part of what it shares with
/// others; not what lies on a disk. Between steps.
void add(MemoryUse& use, const shard::Engine& engine);

/// Fills `program`, `other`, the peak and the limit, when all other categories are known. `before`: the program's part
/// of a use that was completed before the first step; nothing: this is that one. Walks the page tables.
void complete(MemoryUse& use, c10::Device device, int ranks_of_host, std::optional<double> before);

}  // namespace tesserae::monitor
