#include "tesserae/cost/machine.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::cost {
namespace {

using Json = nlohmann::ordered_json;

// What a file says that it is: another meaning of any number gets another number here.
constexpr int format = 3;

Json points_of(const Curve& curve) {
  Json points = Json::array();
  for (const auto& [size, rate] : curve.points()) points.push_back({size, rate});
  return points;
}

Curve curve_from(const nlohmann::json& points) {
  if (points.empty()) return {};
  std::vector<Curve::Point> found;
  for (const auto& point : points) found.push_back({.size = point.at(0), .rate = point.at(1)});
  return Curve(std::move(found));
}

Machine::Workspaces workspaces_from(const nlohmann::json& document) {
  return {.bytes = curve_from(document.at("bytes")), .rows = document.at("rows"), .depth = document.at("depth")};
}

void check(const Machine& machine) {
  const auto require = [](bool sound, const char* name, double value) {
    if (!sound) throw InvalidArgument("machine_from", cat(name, " is ", value, ", which cannot be"));
  };
  const auto positive = [&](const char* name, double value) {
    require(std::isfinite(value) && value > 0, name, value);
  };
  const auto no_less_than_0 = [&](const char* name, double value) {
    require(std::isfinite(value) && value >= 0, name, value);
  };
  positive("per_host", machine.per_host);
  positive("memory", machine.memory);
  positive("links.inside", machine.links.inside);
  positive("links.between", machine.links.between);
  positive("links.memory", machine.links.memory);
  no_less_than_0("links.inside_latency", machine.links.inside_latency);
  no_less_than_0("links.between_latency", machine.links.between_latency);
  no_less_than_0("meeting", machine.meeting);
  require(machine.overlap >= 0 && machine.overlap <= 1, "overlap", machine.overlap);
  for (const auto& [dtype, rates] : machine.compute) {
    no_less_than_0("process", rates.process);
    no_less_than_0("workspaces.rows", rates.workspaces.rows);
    no_less_than_0("workspaces.depth", rates.workspaces.depth);
    no_less_than_0("share_split", rates.share_split);
    no_less_than_0("for_units", rates.for_units);
    no_less_than_0("for_parameters", rates.for_parameters);
    require(rates.share_more > -1 && rates.share_more < 10, "share_more", rates.share_more);
    if (!rates.products.known()) throw InvalidArgument("machine_from", cat("no rates of products in ", dtype));
  }
}

}  // namespace

const Machine::Compute& Machine::of(const std::string& dtype) const {
  const auto found = compute.find(dtype);
  if (found != compute.end()) return found->second;
  std::string known;
  for (const auto& [name_of_one, rates] : compute) known += cat(known.empty() ? "" : ", ", name_of_one);
  throw InvalidArgument("Machine", cat("of \"", name, "\" it is not known how fast it computes in ", dtype,
                                       ", only in ", known, "; measure it: tesserae probe --dtype ", dtype));
}

Json to_json(const Machine& machine) {
  Json compute = Json::object();
  for (const auto& [dtype, rates] : machine.compute) {
    compute[dtype] = {{"products", points_of(rates.products)},
                      {"weights", points_of(rates.weights)},
                      {"attention", points_of(rates.attention)},
                      {"activations", points_of(rates.activations)},
                      {"loss", points_of(rates.loss)},
                      {"share_more", rates.share_more},
                      {"share_split", rates.share_split},
                      {"for_units", rates.for_units},
                      {"for_parameters", rates.for_parameters},
                      {"process", rates.process},
                      {"workspaces",
                       {{"bytes", points_of(rates.workspaces.bytes)},
                        {"rows", rates.workspaces.rows},
                        {"depth", rates.workspaces.depth}}},
                      {"widened", rates.widened}};
  }
  const Links& links = machine.links;
  return {{"machine", format},
          {"name", machine.name},
          {"measured", machine.measured},
          {"per_host", machine.per_host},
          {"memory", machine.memory},
          {"shares_place", machine.shares_place},
          {"shared_copy", machine.shared_copy},
          {"compute", compute},
          {"optimizer", points_of(machine.optimizer)},
          {"gather", points_of(machine.gather)},
          {"reduce", points_of(machine.reduce)},
          {"all_reduce", points_of(machine.all_reduce)},
          {"links",
           {{"inside", links.inside},
            {"between", links.between},
            {"inside_latency", links.inside_latency},
            {"between_latency", links.between_latency},
            {"memory", links.memory}}},
          {"knows_network", machine.knows_network},
          {"overlap", machine.overlap},
          {"meeting", machine.meeting}};
}

Machine machine_from(const nlohmann::json& document) {
  try {
    if (document.at("machine") != format) {
      throw InvalidArgument("machine_from", cat("the numbers are of format ", document.at("machine").dump(),
                                                ", this program reads ", format, ": probe again"));
    }
    Machine machine;
    machine.name = document.at("name");
    machine.measured = document.at("measured");
    machine.per_host = document.at("per_host");
    machine.memory = document.at("memory");
    machine.shares_place = document.at("shares_place");
    machine.shared_copy = document.at("shared_copy");
    for (const auto& [dtype, rates] : document.at("compute").items()) {
      machine.compute[dtype] = {.products = curve_from(rates.at("products")),
                                .weights = curve_from(rates.at("weights")),
                                .attention = curve_from(rates.at("attention")),
                                .activations = curve_from(rates.at("activations")),
                                .loss = curve_from(rates.at("loss")),
                                .share_more = rates.at("share_more"),
                                .share_split = rates.at("share_split"),
                                .for_units = rates.at("for_units"),
                                .for_parameters = rates.at("for_parameters"),
                                .process = rates.at("process"),
                                .workspaces = workspaces_from(rates.at("workspaces")),
                                .widened = rates.value("widened", false)};
    }
    machine.optimizer = curve_from(document.at("optimizer"));
    machine.gather = curve_from(document.at("gather"));
    machine.reduce = curve_from(document.at("reduce"));
    machine.all_reduce = curve_from(document.at("all_reduce"));
    const nlohmann::json& links = document.at("links");
    machine.links = {.inside = links.at("inside"),
                     .between = links.at("between"),
                     .inside_latency = links.at("inside_latency"),
                     .between_latency = links.at("between_latency"),
                     .memory = links.at("memory")};
    machine.knows_network = document.at("knows_network");
    machine.overlap = document.at("overlap");
    machine.meeting = document.at("meeting");
    check(machine);
    return machine;
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument("machine_from", cat("these are not the numbers of a machine: ", error.what()));
  }
}

}  // namespace tesserae::cost
