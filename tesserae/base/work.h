#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tesserae {

/// What a rank has to do in a step, as numbers: where ranks have more of it than others, the others wait.
enum class Work : uint8_t {
  tokens,         ///< that its forwards take in: of a sequence that is cut over ranks, its own
  expert_tokens,  ///< that its experts work on, once for each choice
  pairs,          ///< of a query and a key that it attends to, of all layers; heads do not count
};
inline constexpr size_t work_count = 3;
constexpr std::array<std::string_view, work_count> work_names = {"tokens", "expert_tokens", "pairs"};

/// A number for each.
using PerWork = std::array<uint64_t, work_count>;

/// Adds to what the calling thread has done. Whoever knows it tells it, in forwards; what a backward computes again is
/// not told.
void count_work(Work what, int64_t amount);
/// Since the calling thread began. What an evaluation does is among it: who asks takes that away.
const PerWork& work_of_this_thread();

}  // namespace tesserae
