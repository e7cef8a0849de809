#include "tesserae/dial/record.h"

#include <sstream>

#include "tesserae/base/error.h"

namespace tesserae::dial {
namespace {

// One list of fields for both directions: what is written is what is read. Numbers come back to the last bit.
template <class Visit, class F>
void fields_of(F& facts, const Visit& visit, const cost::Facts* /*of*/) {
  visit("host_of", facts.host_of);
  visit("parameters", facts.parameters);
  visit("trained", facts.trained);
  visit("root_unit", facts.root_unit);
  visit("largest_unit", facts.largest_unit);
  visit("trained_root", facts.trained_root);
  visit("trained_unit", facts.trained_unit);
  visit("units", facts.units);
  visit("compute_bytes", facts.compute_bytes);
  visit("reduce_bytes", facts.reduce_bytes);
  visit("master_bytes", facts.master_bytes);
  visit("state_bytes", facts.state_bytes);
  visit("gathers_at_once", facts.gathers_at_once);
  visit("reductions_at_once", facts.reductions_at_once);
  visit("free_after_forward", facts.free_after_forward);
  visit("free_after_backward", facts.free_after_backward);
  visit("micro_batches", facts.micro_batches);
  visit("two_hop", facts.two_hop);
  visit("tensor", facts.tensor);
  visit("ranks_share_place", facts.ranks_share_place);
  visit("shared_copy", facts.shared_copy);
  visit("two_levels", facts.two_levels);
  visit("expert_degree", facts.experts.degree);
  visit("expert_parameters", facts.experts.parameters);
  visit("expert_unit", facts.experts.unit);
  visit("expert_units", facts.experts.units);
}

template <class Visit, class F>
void fields_of(F& links, const Visit& visit, const cost::Links* /*of*/) {
  visit("inside", links.inside);
  visit("between", links.between);
  visit("inside_latency", links.inside_latency);
  visit("between_latency", links.between_latency);
  visit("memory", links.memory);
}

template <class Visit, class F>
void fields_of(F& options, const Visit& visit, const TunerOptions* /*of*/) {
  visit("headroom", options.headroom);
  visit("budget", options.budget);
  visit("allowance", options.allowance);
  visit("planned_steps", options.planned_steps);
  visit("settle_steps", options.settle_steps);
  visit("reference_steps", options.reference_steps);
  visit("trial_steps", options.trial_steps);
  visit("window", options.window);
  visit("worth", options.worth);
  visit("drift", options.drift);
}

template <class T>
Json written(const T& value) {
  Json json;
  fields_of(
      value, [&json](const char* name, const auto& field) { json[name] = field; }, &value);
  return json;
}

template <class T>
T read(const Json& json) {
  T value;
  fields_of(
      value, [&json](const char* name, auto& field) { json.at(name).get_to(field); }, &value);
  return value;
}

Observation read_observation(const Json& json) {
  return {.step = json.at("step"),
          .degrees = degrees_from(json.at("degrees")),
          .seconds = json.at("seconds"),
          .change_seconds = json.at("change_seconds"),
          .place = json.at("place"),
          .free = json.at("free")};
}

}  // namespace

void Record::begin(const cost::Facts& facts, const cost::Links& links, const TunerOptions& options) {
  file_->write(Json{{"facts", written(facts)}, {"links", written(links)}, {"options", written(options)}}.dump() + "\n");
}

void Record::add(const Observation& seen, const std::optional<Decision>& decision) {
  Json line = {{"step", seen.step},       {"degrees", to_json(seen.degrees)},
               {"seconds", seen.seconds}, {"change_seconds", seen.change_seconds},
               {"place", seen.place},     {"free", seen.free}};
  if (decision) line["decision"] = {{"degrees", to_json(decision->degrees)}, {"why", decision->why}};
  file_->write(line.dump() + "\n");
}

Replay replay(const std::string& text) {
  Replay result;
  std::optional<Tuner> tuner;
  std::istringstream lines(text);
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    try {
      const Json json = Json::parse(line);
      if (json.contains("facts")) {
        tuner.emplace(read<cost::Facts>(json.at("facts")), read<cost::Links>(json.at("links")),
                      read<TunerOptions>(json.at("options")));
        continue;
      }
      if (!tuner) throw Corruption("replay", cat("line ", number, " comes before the facts"));
      Recorded recorded{.seen = read_observation(json), .decision = std::nullopt};
      if (json.contains("decision")) {
        recorded.decision = {.degrees = degrees_from(json["decision"].at("degrees")),
                             .why = json["decision"].at("why")};
      }
      result.decided.push_back(tuner->observe(recorded.seen));
      result.recorded.push_back(std::move(recorded));
    } catch (const Json::exception& error) {
      throw Corruption("replay", cat("line ", number, " is none of a record: ", error.what()));
    }
  }
  return result;
}

}  // namespace tesserae::dial
