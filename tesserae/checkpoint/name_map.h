#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

namespace tesserae::checkpoint {

/// Renames parameters between our names and other people's, by rules such as "blocks.*.attention.out.weight" ->
/// "model.layers.*.self_attn.o_proj.weight". A star stands for one or more characters without a dot; the n-th star
/// stands for the same text on both sides. The first rule that fits counts; a name that none fits stays as it is.
class NameMap {
 public:
  using Rules = std::vector<std::pair<std::string, std::string>>;

  NameMap() = default;
  /// Throws InvalidArgument for a rule whose sides differ in stars.
  explicit NameMap(Rules rules);
  /// From an object of strings, in the order of the text: {"ours": "theirs", ...}.
  static NameMap from_json(const nlohmann::ordered_json& rules);

  std::string theirs(const std::string& ours) const;
  std::string ours(const std::string& theirs) const;
  bool empty() const { return rules_.empty(); }

 private:
  Rules rules_;
};

}  // namespace tesserae::checkpoint
