#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tesserae::mesh {

/// A direction in which the ranks of a job differ. Tensor, context and data, innermost first, make up the job; expert
/// and expert_data cut the ranks of context and data a second way, for what belongs to experts. (Meshes have
/// axes; tensors have dimensions.)
enum class Axis : uint8_t {
  tensor,       ///< T ranks hold the parts of every split tensor and read the same tokens
  context,      ///< C ranks read consecutive pieces of the same sequences
  data,         ///< D ranks read different sequences
  expert,       ///< E ranks hold different experts
  expert_data,  ///< the ranks that hold the same experts
};

/// The name in manifests and messages: "tensor", "context", "data", "expert", "expert_data".
std::string_view to_string(Axis axis);
std::optional<Axis> axis_from_name(std::string_view name);
/// Every name, in the order of Axis.
std::vector<std::string> axis_names();

/// Axes merged into one, in their order, innermost first. A set: the order in which they are written does not count.
class AxisSet {
 public:
  constexpr AxisSet(Axis axis) : bits_(bit(axis)) {}  // NOLINT: one axis is a set
  /// Throws InvalidArgument for a set that mixes the two ways to cut the same ranks.
  constexpr AxisSet(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) bits_ |= bit(axis);
    const bool first_way = has(Axis::context) || has(Axis::data);
    if (first_way && (has(Axis::expert) || has(Axis::expert_data))) refuse(*this);
  }

  constexpr bool has(Axis axis) const { return (bits_ & bit(axis)) != 0; }
  /// Innermost first.
  std::vector<Axis> list() const;

  constexpr auto operator<=>(const AxisSet&) const = default;

 private:
  static constexpr unsigned bit(Axis axis) { return 1U << static_cast<unsigned>(axis); }
  [[noreturn]] static void refuse(const AxisSet& axes);

  unsigned bits_ = 0;
};

/// "context x data".
std::string to_string(const AxisSet& axes);

/// What the ranks of a job have in common and what not, by name, so that nobody derives it again. Of tensor and context
/// parallelism, expert parallelism and none at all these are the same questions with other answers.
namespace axes {
inline constexpr AxisSet tensor{Axis::tensor};                          ///< hold the parts of every split tensor
inline constexpr AxisSet state{Axis::context, Axis::data};              ///< shard the training state: N ranks
inline constexpr AxisSet expert_state{Axis::expert_data};               ///< shard the state of an expert: N / E ranks
inline constexpr AxisSet batch{Axis::data};                             ///< read different batches
inline constexpr AxisSet loss{Axis::context, Axis::data};               ///< the loss is averaged over them
inline constexpr AxisSet job{Axis::tensor, Axis::context, Axis::data};  ///< everyone
}  // namespace axes

}  // namespace tesserae::mesh
