#include "tesserae/mesh/host_list.h"

#include <charconv>
#include <cstdint>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

constexpr size_t most_hosts = 1'000'000;

[[noreturn]] void malformed(std::string_view function, std::string_view list, std::string_view why) {
  throw InvalidArgument(function, cat("'", list, "' is malformed: ", why));
}

/// `text` as a number, all of it, or -1.
int64_t number(std::string_view text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 ? value : -1;
}

/// Cuts `text` at the commas that are outside brackets.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  int depth = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == ',' && depth == 0)) {
      parts.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    } else if (text[i] == '[' || text[i] == ']') {
      depth += text[i] == '[' ? 1 : -1;
    }
  }
  return parts;
}

/// "01-03" as 01 02 03, "07" as itself: what one item of a bracket stands for.
std::vector<std::string> expand_range(std::string_view list, std::string_view range) {
  const size_t dash = range.find('-');
  const std::string_view low = range.substr(0, dash);
  const std::string_view high = dash == std::string_view::npos ? low : range.substr(dash + 1);
  const int64_t first = number(low);
  const int64_t last = number(high);
  if (first < 0 || last < first) malformed("expand_host_list", list, cat("'", range, "' is no range of numbers"));
  if (static_cast<uint64_t>(last - first) >= most_hosts) malformed("expand_host_list", list, "it names too many hosts");
  std::vector<std::string> expanded;
  for (int64_t value = first; value <= last; ++value) {
    std::string digits = std::to_string(value);
    if (digits.size() < low.size()) digits.insert(0, low.size() - digits.size(), '0');
    expanded.push_back(std::move(digits));
  }
  return expanded;
}

/// Every host that one name with brackets stands for.
std::vector<std::string> expand_name(std::string_view list, std::string_view name) {
  const size_t open = name.find('[');
  const size_t close = name.find(']');
  if (open == std::string_view::npos && close == std::string_view::npos) return {std::string(name)};
  if (open > close || close == std::string_view::npos) malformed("expand_host_list", list, "brackets do not match");
  std::vector<std::string> middles;
  for (std::string_view range : split(name.substr(open + 1, close - open - 1))) {
    for (std::string& digits : expand_range(list, range)) middles.push_back(std::move(digits));
  }
  const std::vector<std::string> tails = expand_name(list, name.substr(close + 1));
  if (middles.size() * tails.size() > most_hosts) malformed("expand_host_list", list, "it names too many hosts");
  std::vector<std::string> hosts;
  for (const std::string& middle : middles) {
    for (const std::string& tail : tails) hosts.push_back(cat(name.substr(0, open), middle, tail));
  }
  return hosts;
}

}  // namespace

std::vector<std::string> expand_host_list(std::string_view list) {
  std::vector<std::string> hosts;
  for (std::string_view name : split(list)) {
    if (name.empty()) malformed("expand_host_list", list, "a host has no name");
    for (std::string& host : expand_name(list, name)) hosts.push_back(std::move(host));
    if (hosts.size() > most_hosts) malformed("expand_host_list", list, "it names too many hosts");
  }
  return hosts;
}

std::vector<int> expand_task_counts(std::string_view counts) {
  std::vector<int> tasks;
  for (std::string_view item : split(counts)) {
    int64_t repeats = 1;
    const size_t open = item.find("(x");
    if (open != std::string_view::npos) {
      repeats = item.ends_with(')') ? number(item.substr(open + 2, item.size() - open - 3)) : -1;
    }
    const int64_t count = number(item.substr(0, open));
    if (count < 1 || count > INT32_MAX || repeats < 1 || tasks.size() + static_cast<size_t>(repeats) > most_hosts) {
      malformed("expand_task_counts", counts, cat("'", item, "' is no count of tasks"));
    }
    tasks.insert(tasks.end(), static_cast<size_t>(repeats), static_cast<int>(count));
  }
  return tasks;
}

}  // namespace tesserae::mesh
