#include "tesserae/watch/run_folder.h"

#include <algorithm>

#include "tesserae/base/checksum.h"
#include "tesserae/base/error.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/os/limits.h"
#include "tesserae/os/seconds.h"

namespace tesserae::watch {
namespace {

constexpr const char* now_name = "monitor/now.json";
constexpr const char* timeline_name = "monitor/timeline.json";
constexpr const char* events_name = "monitor/events.jsonl";
constexpr const char* metrics_name = "metrics.jsonl";
constexpr const char* config_name = "config.json";
constexpr const char* summary_name = "summary.json";

constexpr uint64_t most_document_bytes = 64 << 20;
constexpr uint64_t marked_bytes = 1024;  // some lines
constexpr double silence = 10;           // seconds after which a job that tells nothing is not there

/// How large a file of the run is; nothing: there is none, or it is not one that a run writes (a link could lead out
/// of the folder, a pipe could block for ever).
std::optional<os::FileStatus> regular(const os::Path& path) {
  try {
    const os::FileStatus status = os::files().status(path);
    const bool through_link =
        os::files().status(path.parent_path()).is_link && path.parent_path().filename() == "monitor";
    if (status.kind == os::FileKind::file && !status.is_link && !through_link) return status;
  } catch (const IoError&) {
    // As if it were not there.
  }
  return std::nullopt;
}

/// At most `count` bytes from `from` on; fewer where the file ends, or cannot be read.
std::string bytes_of(const os::Path& path, uint64_t from, uint64_t count) {
  std::string bytes(count, '\0');
  try {
    bytes.resize(os::files().open(path)->read_at(from, bytes));
  } catch (const IoError&) {
    bytes.clear();
  }
  return bytes;
}

/// Of the last bytes of what was read: lines of steps tell two files apart, since no step takes as long as another.
std::string mark_of(std::string_view read) {
  return to_hex(checksum(read.substr(read.size() - std::min<size_t>(read.size(), marked_bytes))));
}

/// A config.json alone says nothing: models of Hugging Face have one.
bool is_run(const os::Path& folder) {
  for (const char* name : {now_name, events_name, metrics_name, summary_name, dial::socket_name}) {
    if (os::files().exists(folder / name)) return true;
  }
  return os::files().status(folder / "monitor").kind == os::FileKind::directory;
}

/// The runs right below a folder, for who named the folder of all runs.
std::string runs_below(const os::Path& folder) {
  std::string found;
  int count = 0;
  for (const std::string& name : os::files().list(folder)) {
    if (os::files().status(folder / name).kind != os::FileKind::directory || !is_run(folder / name)) continue;
    if (++count > 8) return found + ", ...";
    found += (found.empty() ? "" : ", ") + (folder / name).native();
  }
  return found;
}

}  // namespace

RunFolder::RunFolder(const os::Path& folder, bool begins) : folder_(folder) {
  constexpr std::string_view function = "watch";
  if (os::files().status(folder).kind != os::FileKind::directory) {
    throw InvalidArgument(function, cat("there is no folder ", folder.native(),
                                        ": give a run's folder, where its "
                                        "monitor/ or metrics.jsonl is (`tesserae train` says it when it begins)"));
  }
  if (begins || is_run(folder)) return;
  const std::string below = runs_below(folder);
  throw InvalidArgument(
      function,
      cat(folder.native(), " is not a run's folder: it has no monitor/ and no metrics.jsonl. ",
          below.empty() ? "A script has one where run.folder is set (tsm.init)" : "Below it are runs: " + below));
}

RunFolder::Document RunFolder::read(const char* name) {
  const os::Path path = folder_ / name;
  const std::optional<os::FileStatus> status = regular(path);
  const std::scoped_lock lock(mutex_);
  Kept& kept = kept_[name];
  if (!status || status->size > most_document_bytes) {
    kept = {};
  } else if (!kept.document || kept.modified != status->modified || kept.size != status->size) {
    std::string text = bytes_of(path, 0, status->size + 1);
    if (Json::accept(text)) {
      kept = {.modified = status->modified,
              .size = status->size,
              .document = std::make_shared<const std::string>(std::move(text))};
    }
  }
  return kept.document;
}

Json RunFolder::parsed(const char* name) {
  const Document document = read(name);
  return document ? Json::parse(*document, nullptr, false) : Json();
}

RunFolder::Document RunFolder::now() {
  return read(now_name);
}

RunFolder::Life RunFolder::life() {
  const Json now = parsed(now_name);
  const bool summary = regular(folder_ / summary_name).has_value();
  if (!now.is_object() || !now.contains("time") || !now["time"].is_number()) return {.ended = summary};
  const double told = now["time"];
  const std::scoped_lock lock(mutex_);
  // By this clock alone where that is possible: the job's host may have another. Only how old a first sight is, or
  // one after a while in which nobody looked, must be taken from what the job wrote.
  const os::TimePoint present = os::now();
  const bool watched = looked_ && os::seconds_since(*looked_) < silence / 2;
  if (told_ != told) {
    age_then_ = watched ? 0 : std::max(0.0, os::time_of_day() - told);
    changed_ = present;
    told_ = told;
  }
  looked_ = present;
  Life life{.silent_seconds = age_then_ + os::seconds_since(changed_)};
  const auto state = now.find("state");
  life.ended = state != now.end() && *state == "ended";
  life.live = !life.ended && life.silent_seconds < silence;
  if (!life.live && summary) life.ended = true;
  life.died = !life.live && !life.ended;
  return life;
}

Json RunFolder::run() {
  const Life life = this->life();
  std::error_code ignored;
  const os::Path whole = std::filesystem::absolute(folder_, ignored).lexically_normal();
  const os::Path named = whole.has_filename() ? whole : whole.parent_path();
  return {{"name", named.filename().native()},
          {"folder", named.native()},
          {"live", life.live},
          {"ended", life.ended},
          {"died", life.died},
          {"silent_seconds", life.silent_seconds},
          {"time", os::time_of_day()},
          {"has",
           {{"now", now() != nullptr},
            {"timeline", regular(folder_ / timeline_name).has_value()},
            {"dial", os::files().exists(folder_ / dial::socket_name)}}},
          {"config", parsed(config_name)},
          {"summary", parsed(summary_name)}};
}

std::optional<std::string> RunFolder::timeline(size_t from, size_t count) {
  const Document document = read(timeline_name);
  if (!document) return std::nullopt;
  const std::scoped_lock lock(mutex_);
  if (timeline_.document != document) {
    Json all = Json::parse(*document, nullptr, false);
    timeline_ = {.document = document, .head = {}, .ranks = {}};
    if (!all.is_object() || !all.contains("ranks") || !all["ranks"].is_array()) return std::nullopt;
    for (const Json& rank : all["ranks"]) timeline_.ranks.push_back(rank.dump());
    all.erase("ranks");
    all["total"] = timeline_.ranks.size();
    timeline_.head = all.dump();
    timeline_.head.pop_back();
  }
  if (timeline_.head.empty()) return std::nullopt;
  std::string out = timeline_.head + ", \"ranks\": [";
  const size_t begin = std::min(from, timeline_.ranks.size());
  const size_t end = begin + std::min(count, timeline_.ranks.size() - begin);
  for (size_t i = begin; i < end; ++i) out += (i == begin ? "" : ",") + timeline_.ranks[i];
  return out + "]}";
}

RunFolder::Lines RunFolder::lines(const char* name, uint64_t from, const std::string& mark) const {
  const os::Path path = folder_ / name;
  const std::optional<os::FileStatus> status = regular(path);
  if (!status) return {};
  Lines lines{.text = {}, .from = from <= status->size ? from : 0, .size = status->size};
  const uint64_t before = std::min(lines.from, marked_bytes);
  std::string bytes = bytes_of(path, lines.from - before, before + std::min(most_line_bytes, lines.size - lines.from));
  if (bytes.size() < before) return {.text = {}, .from = from, .next = from, .size = lines.size, .mark = mark};
  if (!mark.empty() && before > 0 && mark_of(std::string_view(bytes).substr(0, before)) != mark) {
    return this->lines(name, 0, {});
  }
  lines.text = bytes.substr(before);
  const uint64_t got = lines.text.size();
  lines.text.resize(lines.text.rfind('\n') + 1);                    // npos + 1 is 0: no line is whole
  const bool skips = lines.text.empty() && got == most_line_bytes;  // what is left of that line is no JSON
  const uint64_t taken = skips ? got : lines.text.size();
  lines.next = lines.from + taken;
  bytes.resize(before + taken);
  lines.mark = mark_of(bytes);
  return lines;
}

RunFolder::Lines RunFolder::metrics(uint64_t from, const std::string& mark) const {
  return lines(metrics_name, from, mark);
}

RunFolder::Lines RunFolder::events(uint64_t from, const std::string& mark) const {
  return lines(events_name, from, mark);
}

Json RunFolder::last_metrics() const {
  constexpr uint64_t tail = 64 << 10;
  const std::optional<os::FileStatus> status = regular(folder_ / metrics_name);
  if (!status) return {};
  std::string text = lines(metrics_name, status->size - std::min(tail, status->size), {}).text;
  if (text.empty()) return {};
  text.pop_back();
  Json line = Json::parse(text.substr(text.rfind('\n') + 1), nullptr, false);
  return line.is_object() ? line : Json();
}

}  // namespace tesserae::watch
