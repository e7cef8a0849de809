#include "tesserae/checkpoint/name_map.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "tesserae/base/error.h"

namespace tesserae::checkpoint {
namespace {

/// What the stars of `pattern` stand for in `name`; nothing if it does not fit. A star is one or more characters
/// without a dot, as many as the text up to what follows it needs.
std::optional<std::vector<std::string>> match(std::string_view pattern, std::string_view name) {
  std::vector<std::string> stars;
  while (true) {
    const size_t star = pattern.find('*');
    const std::string_view literal = pattern.substr(0, star);
    if (!name.starts_with(literal)) return std::nullopt;
    name.remove_prefix(literal.size());
    if (star == std::string_view::npos) return name.empty() ? std::optional(std::move(stars)) : std::nullopt;
    pattern.remove_prefix(star + 1);

    // What follows the star ends at the next star, or is the end of the name.
    const std::string_view next = pattern.substr(0, pattern.find('*'));
    const size_t end = pattern.empty()                 ? name.size()
                       : next.size() == pattern.size() ? name.size() - std::min(name.size(), next.size())
                                                       : name.find(next, 1);
    if (end == std::string_view::npos || end == 0) return std::nullopt;
    const std::string_view text = name.substr(0, end);
    if (text.find('.') != std::string_view::npos) return std::nullopt;
    stars.emplace_back(text);
    name.remove_prefix(end);
  }
}

std::string fill(std::string_view pattern, const std::vector<std::string>& stars) {
  std::string name;
  size_t next = 0;
  for (const char c : pattern) {
    if (c == '*') {
      name += stars[next++];
    } else {
      name += c;
    }
  }
  return name;
}

}  // namespace

NameMap::NameMap(Rules rules) : rules_(std::move(rules)) {
  for (const auto& [ours, theirs] : rules_) {
    if (std::ranges::count(ours, '*') == std::ranges::count(theirs, '*')) continue;
    throw InvalidArgument("NameMap", cat("\"", ours, "\" and \"", theirs, "\" differ in their number of stars"));
  }
}

NameMap NameMap::from_json(const nlohmann::ordered_json& rules) {
  if (!rules.is_object())
    throw InvalidArgument("NameMap", "a name map is an object of strings: {\"ours\": \"theirs\"}");
  Rules list;
  for (const auto& [ours, theirs] : rules.items()) {
    if (!theirs.is_string()) throw InvalidArgument("NameMap", cat("\"", ours, "\" does not stand for a string"));
    list.emplace_back(ours, theirs.get<std::string>());
  }
  return NameMap(std::move(list));
}

std::string NameMap::theirs(const std::string& ours) const {
  for (const auto& [from, to] : rules_) {
    if (const auto stars = match(from, ours)) return fill(to, *stars);
  }
  return ours;
}

std::string NameMap::ours(const std::string& theirs) const {
  for (const auto& [to, from] : rules_) {
    if (const auto stars = match(from, theirs)) return fill(to, *stars);
  }
  return theirs;
}

}  // namespace tesserae::checkpoint
