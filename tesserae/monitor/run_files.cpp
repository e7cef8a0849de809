#include "tesserae/monitor/run_files.h"

#include <chrono>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::monitor {
namespace {

/// Names may be any bytes.
std::string dumped(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

RunFiles::RunFiles(const os::Path& run) : folder_(run / folder_name) {
  os::files().make_directories(folder_);
  os::files().remove_all(folder_ / "now.json");
  events_ = os::files().append(folder_ / "events.jsonl");
}

std::optional<os::Path> RunFiles::replace(const std::string& name, const std::string& text) {
  try {
    os::files().write(folder_ / (name + ".tmp"), text);
    os::files().rename(folder_ / (name + ".tmp"), folder_ / name);
    told_ = false;
    return folder_ / name;
  } catch (const IoError& error) {
    if (!std::exchange(told_, true))
      log(LogLevel::warning, cat("the monitor's files stay as they were: ", error.what()));
  }
  return std::nullopt;
}

void RunFiles::write_now(const Json& now) {
  replace("now.json", dumped(now));
}

void RunFiles::write_timeline(const Json& timeline) {
  replace("timeline.json", dumped(timeline));
}

std::optional<os::Path> RunFiles::write_stacks(int rank, const std::string& text) {
  return replace(cat("stacks-", rank, ".txt"), text);
}

std::optional<os::Path> RunFiles::write_trace(int64_t first_step, const std::string& trace) {
  return replace(cat("trace-", first_step, ".json"), trace);
}

void RunFiles::add(const Event& event) {
  Json line = {{"time", unix_time()}, {"step", event.step}, {"kind", event.kind}};
  if (event.rank >= 0) line["rank"] = event.rank;
  line["text"] = event.text;
  try {
    events_->write(dumped(line));
  } catch (const IoError& error) {
    if (!std::exchange(told_, true)) log(LogLevel::warning, cat("an event is not written down: ", error.what()));
  }
}

}  // namespace tesserae::monitor
