#include "tesserae/checkpoint/split_json.h"

#include "tesserae/base/error.h"

namespace tesserae::checkpoint {
namespace {

nlohmann::ordered_json json_of(const mesh::Split& split) {
  nlohmann::ordered_json json{{"dim", split.dim}, {"parts", split.parts}, {"blocks", split.blocks}};
  if (split.axis != mesh::Axis::tensor) json["axis"] = mesh::to_string(split.axis);
  return json;
}

mesh::Split split_from(const nlohmann::json& json) {
  return {.dim = json.at("dim"),
          .parts = json.at("parts"),
          .blocks = json.at("blocks"),
          .axis = axis_named(json.value("axis", "tensor"))};
}

}  // namespace

nlohmann::ordered_json json_of(const mesh::Splits& splits) {
  nlohmann::ordered_json json = json_of(splits.first());
  if (!splits.second().whole()) json["then"] = json_of(splits.second());
  return json;
}

mesh::Splits splits_from(const nlohmann::json& json) {
  return {split_from(json), json.contains("then") ? split_from(json.at("then")) : mesh::Split{}};
}

mesh::Axis axis_named(std::string_view name) {
  if (const auto axis = mesh::axis_from_name(name)) return *axis;
  std::string known;
  for (const std::string& axis : mesh::axis_names()) known += cat(known.empty() ? "" : ", ", axis);
  throw InvalidArgument("axis_named", cat("unknown axis \"", name.substr(0, 40), "\"; there are ", known));
}

}  // namespace tesserae::checkpoint
