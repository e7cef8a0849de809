#include "tesserae/monitor/report.h"

#include <nlohmann/json.hpp>

#include "tesserae/base/error.h"

namespace tesserae::monitor {
namespace {

using nlohmann::json;

// Microseconds as integers: a third of what doubles take, and finer than clocks of hosts agree on anything.
int64_t micros(double seconds) {
  return static_cast<int64_t>(seconds * 1e6 + 0.5);
}
double seconds_of(const json& micros) {
  return micros.get<double>() / 1e6;
}

json row(const PerStage& values) {
  json all = json::array();
  for (const double value : values) all.push_back(micros(value));
  return all;
}
PerStage per_stage(const json& all) {
  PerStage values{};
  for (size_t i = 0; i < stage_count; ++i) values[i] = seconds_of(all.at(i));
  return values;
}

json to_json(const StepTimes& times) {
  return {times.step,
          micros(times.total),
          row(times.seconds),
          row(times.off_processor),
          row(times.stopped),
          times.faults,
          {times.degrees.parameters, times.degrees.gradients, times.degrees.optimizer}};
}
StepTimes times_from(const json& all) {
  return {.step = all.at(0),
          .total = seconds_of(all.at(1)),
          .seconds = per_stage(all.at(2)),
          .off_processor = per_stage(all.at(3)),
          .stopped = per_stage(all.at(4)),
          .faults = all.at(5),
          .degrees = {all.at(6).at(0), all.at(6).at(1), all.at(6).at(2)}};
}

json to_json(const Timeline& timeline) {
  json spans = json::array();
  for (const Span& span : timeline.spans) {
    spans.push_back({span.lane, static_cast<int>(span.stage), span.unit, micros(span.begin), micros(span.seconds)});
  }
  return {timeline.step, micros(timeline.seconds), std::move(spans)};
}
Stage stage_from(const json& number) {
  const auto stage = number.get<size_t>();
  if (stage >= stage_count) throw Corruption("monitor::report_from", cat("there is no stage ", stage));
  return static_cast<Stage>(stage);
}
Timeline timeline_from(const json& all) {
  Timeline timeline{.step = all.at(0), .seconds = seconds_of(all.at(1)), .spans = {}};
  for (const json& span : all.at(2)) {
    timeline.spans.push_back({.lane = span.at(0),
                              .stage = stage_from(span.at(1)),
                              .unit = span.at(2),
                              .begin = seconds_of(span.at(3)),
                              .seconds = seconds_of(span.at(4))});
  }
  return timeline;
}

json to_json(const comm::LinkUse& use) {
  return {use.link, use.lane, use.verb, use.ranks, use.calls, use.bytes, micros(use.seconds), use.quickest};
}
comm::LinkUse use_from(const json& all) {
  return {.link = all.at(0),
          .lane = all.at(1),
          .verb = all.at(2),
          .ranks = all.at(3),
          .calls = all.at(4),
          .bytes = all.at(5),
          .seconds = seconds_of(all.at(6)),
          .quickest = all.at(7)};
}

std::string cbor(const json& all) {
  std::string bytes;
  json::to_cbor(all, bytes);
  return bytes;
}

template <class Read>
auto read_cbor(std::string_view bytes, const Read& read) {
  try {
    return read(json::from_cbor(bytes));
  } catch (const json::exception& error) {
    throw Corruption("monitor::report_from", cat(bytes.size(), " bytes are no report: ", error.what()));
  }
}

}  // namespace

std::string to_bytes(const Report& report) {
  json all = {{"number", report.number},
              {"now",
               {report.now.step, static_cast<int>(report.now.stage), report.now.unit, micros(report.now.seconds),
                report.now.progress}},
              {"memory", {report.memory.bytes, report.memory.peak}},
              {"sent", report.sent},
              {"work", report.work},
              {"generation", report.generation},
              {"ended", report.ended}};
  if (report.memory.limit) all["limit"] = *report.memory.limit;
  for (const StepTimes& times : report.steps) all["steps"].push_back(to_json(times));
  for (const comm::LinkUse& use : report.links) all["links"].push_back(to_json(use));
  if (report.timeline) all["timeline"] = to_json(*report.timeline);
  if (report.kept_of > 0) all["kept_of"] = report.kept_of;
  for (const Timeline& timeline : report.kept) all["kept"].push_back(to_json(timeline));
  if (report.stacks_of > 0) all["stacks"] = {report.stacks_of, report.stacks};
  return cbor(all);
}

Report report_from(std::string_view bytes) {
  return read_cbor(bytes, [](const json& all) {
    Report report{.number = all.at("number")};
    const json& now = all.at("now");
    report.now = {.step = now.at(0),
                  .stage = stage_from(now.at(1)),
                  .unit = now.at(2),
                  .seconds = seconds_of(now.at(3)),
                  .progress = now.at(4)};
    report.generation = all.at("generation");
    report.ended = all.at("ended");
    report.memory.bytes = all.at("memory").at(0).get<decltype(report.memory.bytes)>();
    report.memory.peak = all.at("memory").at(1);
    if (all.contains("limit")) report.memory.limit = all.at("limit").get<double>();
    report.sent = all.at("sent").get<PerVerb>();
    report.work = all.at("work").get<PerWork>();
    for (const json& use : all.value("links", json::array())) report.links.push_back(use_from(use));
    for (const json& times : all.value("steps", json::array())) report.steps.push_back(times_from(times));
    if (all.contains("timeline")) report.timeline = timeline_from(all.at("timeline"));
    report.kept_of = all.value("kept_of", int64_t{0});
    for (const json& timeline : all.value("kept", json::array())) report.kept.push_back(timeline_from(timeline));
    if (all.contains("stacks")) {
      report.stacks_of = all.at("stacks").at(0);
      report.stacks = all.at("stacks").at(1);
    }
    return report;
  });
}

std::string to_bytes(const Wish& wish) {
  return cbor(
      {wish.generation, wish.timeline_every, wish.keep_first, wish.keep_last, wish.stacks, wish.waits, wish.known});
}

Wish wish_from(std::string_view bytes) {
  return read_cbor(bytes, [](const json& all) {
    return Wish{.generation = all.at(0),
                .timeline_every = all.at(1),
                .keep_first = all.at(2),
                .keep_last = all.at(3),
                .stacks = all.at(4),
                .waits = all.at(5),
                .known = all.at(6)};
  });
}

}  // namespace tesserae::monitor
