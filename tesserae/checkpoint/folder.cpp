#include "tesserae/checkpoint/folder.h"

#include <algorithm>
#include <charconv>

namespace tesserae::checkpoint {
namespace {

constexpr std::string_view prefix = "step-";
constexpr std::string_view suffix = ".tmp";

/// Takes a number without sign or leading zeros off the front of `text`.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const size_t digits = static_cast<size_t>(end - text.data());
  if (error != std::errc() || value < 0 || text.front() == '-' || (digits > 1 && text.front() == '0'))
    return std::nullopt;
  text.remove_prefix(digits);
  return value;
}

}  // namespace

std::optional<Committed> parse_committed(const os::Path& folder, std::string_view name) {
  std::string_view rest = name;
  if (!rest.starts_with(prefix)) return std::nullopt;
  rest.remove_prefix(prefix.size());
  const std::optional<int64_t> step = take_number(rest);
  if (!step) return std::nullopt;
  if (rest.empty()) return Committed{folder / name, *step, 0};
  if (rest.front() != '.') return std::nullopt;
  rest.remove_prefix(1);
  const std::optional<int64_t> version = take_number(rest);
  if (!version || *version == 0 || !rest.empty()) return std::nullopt;
  return Committed{folder / name, *step, *version};
}

bool means_one(const os::Path& path) {
  if (os::files().exists(path / manifest_name)) return true;
  const os::Path name = path.has_filename() ? path.filename() : path.parent_path().filename();
  return parse_committed({}, name.native()) && list_checkpoints(path).empty();
}

bool is_stray(std::string_view name) {
  return name.starts_with(prefix) && name.ends_with(suffix);
}

std::optional<Stray> parse_stray(std::string_view name) {
  if (!is_stray(name)) return std::nullopt;
  std::string_view rest = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
  const std::optional<int64_t> step = take_number(rest);
  if (!step || rest.size() < 2 || rest.front() != '.') return std::nullopt;
  return Stray{*step, std::string(rest.substr(1))};
}

std::vector<Committed> list_checkpoints(const os::Path& folder) {
  std::vector<Committed> found;
  if (os::files().status(folder).kind == os::FileKind::missing) return found;
  for (const std::string& name : os::files().list(folder)) {
    std::optional<Committed> committed = parse_committed(folder, name);
    if (!committed || os::files().status(committed->path).kind != os::FileKind::directory) continue;
    found.push_back(std::move(*committed));
  }
  std::ranges::sort(found, {}, &Committed::key);
  return found;
}

std::optional<Committed> last_of_step(const os::Path& folder, int64_t step) {
  std::optional<Committed> last;
  for (Committed& committed : list_checkpoints(folder)) {
    if (committed.step == step) last = std::move(committed);
  }
  return last;
}

os::Path set_aside(const os::Path& checkpoint) {
  os::Path name = checkpoint.native() + ".damaged";
  for (int again = 2; os::files().exists(name); ++again) name = cat(checkpoint.native(), ".damaged.", again);
  os::files().rename(checkpoint, name);
  return name;
}

}  // namespace tesserae::checkpoint
