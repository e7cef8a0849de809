#include "tesserae/mesh/axis.h"

#include <array>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

constexpr std::array<std::string_view, 5> names{"tensor", "context", "data", "expert", "expert_data"};

}  // namespace

std::string_view to_string(Axis axis) {
  return names.at(static_cast<size_t>(axis));
}

std::optional<Axis> axis_from_name(std::string_view name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<Axis>(i);
  }
  return std::nullopt;
}

std::vector<std::string> axis_names() {
  return {names.begin(), names.end()};
}

std::vector<Axis> AxisSet::list() const {
  std::vector<Axis> axes;
  for (size_t i = 0; i < names.size(); ++i) {
    if (has(static_cast<Axis>(i))) axes.push_back(static_cast<Axis>(i));
  }
  return axes;
}

void AxisSet::refuse(const AxisSet& axes) {
  throw InvalidArgument("AxisSet", cat(to_string(axes),
                                       " are no axes of one mesh: context x data and expert x "
                                       "expert_data cut the same ranks; merge axes of one of the two"));
}

std::string to_string(const AxisSet& axes) {
  std::string text;
  for (const Axis axis : axes.list()) text += cat(text.empty() ? "" : " x ", to_string(axis));
  return text.empty() ? "no axis" : text;
}

}  // namespace tesserae::mesh
