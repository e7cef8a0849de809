#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tesserae::monitor {

/// What the thread that trains is doing, in about the order of a step. At each moment it is one of these, so that their
/// durations sum up to the step's.
enum class Stage : uint8_t {
  data,       ///< reads the next batch
  forward,    ///< with the loss
  gather,     ///< waits for parameters
  backward,   ///<
  reduce,     ///< waits for gradients
  optimizer,  ///< the update, with clipping
  agree,      ///< waits for other ranks for any other reason: the norm, what is agreed on at the end of a step
  between,    ///< anything else: evaluation, saving, printing; in Python also data that no DataLoader reads
};
inline constexpr size_t stage_count = 8;

constexpr std::array<std::string_view, stage_count> stage_names = {"data",   "forward",   "gather", "backward",
                                                                   "reduce", "optimizer", "agree",  "between"};

constexpr std::string_view name_of(Stage stage) {
  return stage_names[static_cast<size_t>(stage)];
}
/// Whether a rank waits for others in it. In the others it works itself, and others wait for it.
constexpr bool waits(Stage stage) {
  return stage == Stage::gather || stage == Stage::reduce || stage == Stage::agree;
}
/// As what the waiting within a stage is counted.
constexpr Stage waiting_in(Stage stage) {
  if (waits(stage)) return stage;
  if (stage == Stage::forward) return Stage::gather;
  return stage == Stage::backward ? Stage::reduce : Stage::agree;
}

/// A number for each stage.
using PerStage = std::array<double, stage_count>;

}  // namespace tesserae::monitor
