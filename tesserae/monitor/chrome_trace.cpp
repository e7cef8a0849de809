#include "tesserae/monitor/chrome_trace.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tesserae/base/error.h"

namespace tesserae::monitor {
namespace {

constexpr std::array<const char*, 3> lane_names = {"training thread", "gather lane", "reduce lane"};

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string label(const char* what, size_t rank, size_t lane, const std::string& name) {
  return cat(R"({"ph":"M","name":")", what, R"(","pid":)", rank, R"(,"tid":)", lane, R"(,"args":{"name":)",
             quoted(name), "}},\n");
}

std::string name_of_span(const Span& span, const std::vector<std::string>& units) {
  const auto unit = static_cast<size_t>(span.unit);
  const std::string stage(name_of(span.stage));
  return span.unit >= 0 && unit < units.size() ? cat(stage, " ", units[unit]) : stage;
}

}  // namespace

// Written as text: as a tree of JSON a trace of many ranks would take ten times its size.
std::string chrome_trace(const std::vector<std::vector<Timeline>>& timelines, const std::vector<std::string>& units) {
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (size_t rank = 0; rank < timelines.size(); ++rank) {
    text += label("process_name", rank, 0, cat("rank ", rank));
    for (size_t lane = 0; lane < lane_names.size(); ++lane) {
      text += label("thread_name", rank, lane, lane_names[lane]);
    }
    double begin = 0;  // of the step, in microseconds
    for (const Timeline& step : timelines[rank]) {
      text += cat(R"({"ph":"i","s":"p","name":"step )", step.step, R"(","pid":)", rank, R"(,"tid":0,"ts":)",
                  std::llround(begin), "},\n");
      for (const Span& span : step.spans) {
        text += cat(R"({"ph":"X","name":)", quoted(name_of_span(span, units)), R"(,"cat":")",
                    waits(span.stage) && span.lane == 0 ? "waits" : "works", R"(","pid":)", rank, R"(,"tid":)",
                    static_cast<int>(span.lane), R"(,"ts":)", std::llround(begin + span.begin * 1e6), R"(,"dur":)",
                    std::llround(span.seconds * 1e6), R"(,"args":{"step":)", step.step, "}},\n");
      }
      begin += step.seconds * 1e6;
    }
  }
  if (text.ends_with(",\n")) text.resize(text.size() - 2);
  return text + "\n]}\n";
}

}  // namespace tesserae::monitor
