#include "tesserae/cost/traced.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tesserae/base/error.h"

namespace tesserae::cost {
namespace {

using Json = nlohmann::json;

constexpr int traced_format = 3;

[[noreturn]] void refuse(const std::string& what) {
  throw InvalidArgument("Traced", what);
}

double number_at(const Json& document, const char* key) {
  const double value = document.at(key);
  if (!(value >= 0) || !std::isfinite(value)) refuse(cat(key, " is ", value, " in what was traced: trace again"));
  return value;
}

Traced::Linear linear_from(const Json& document) {
  return {.fixed = number_at(document, "fixed"), .row = number_at(document, "row")};
}

Traced::Pass pass_from(const Json& document) {
  Traced::Pass pass{.blocks = linear_from(document.at("blocks"))};
  for (const Json& each : document.at("peak")) pass.moments.push_back(linear_from(each));
  if (pass.moments.empty()) refuse("peak has no moment in what was traced: trace again");
  for (const Json& each : document.at("products")) {
    pass.products.push_back({.multiplications = number_at(each, "multiplications"),
                             .calls = number_at(each, "calls"),
                             .batched = each.at("batched")});
  }
  for (const Json& each : document.at("attention")) {
    pass.attention.push_back({.tokens = each.at("tokens"), .operations = number_at(each, "operations")});
  }
  return pass;
}

}  // namespace

double Traced::Pass::peak(double rows) const {
  double most = 0;
  for (const Linear& moment : moments) most = std::max(most, moment.at(rows));
  return most;
}

Traced::Traced(const Json& document) {
  try {
    if (!document.is_object() || document.value("traced", Json()) != traced_format) {
      refuse(cat("this is not what `tesserae plan --script` traces, format ", traced_format));
    }
    name_ = document.at("name");
    dtype_ = document.at("dtype");
    parameters_ = document.at("parameters");
    trained_ = document.at("trained");
    root_ = document.at("root");
    units_ = document.at("units").get<std::vector<int64_t>>();
    trained_root_ = document.at("trained_root");
    trained_units_ = document.at("trained_units").get<std::vector<int64_t>>();
    process_ = number_at(document, "process");
    kept_ = pass_from(document.at("kept"));
    recomputed_ = pass_from(document.at("recomputed"));
  } catch (const Json::exception& error) {
    refuse(cat("this is not what `tesserae plan --script` traces: ", error.what()));
  }
  const auto sum = [](const std::vector<int64_t>& units) {
    return std::accumulate(units.begin(), units.end(), int64_t{0});
  };
  const int64_t in_units = sum(units_);
  const auto is_part = [](int64_t trained, int64_t all) { return trained >= 0 && trained <= all; };
  if (parameters_ < 1 || trained_ < 1 || trained_ > parameters_ || root_ + in_units != parameters_ ||
      trained_root_ + sum(trained_units_) != trained_ || !is_part(trained_root_, root_) ||
      !std::ranges::equal(trained_units_, units_, is_part)) {
    refuse(cat(parameters_, " parameters (", trained_, " trained), ", root_, " in the root and ", in_units, " in ",
               units_.size(), " units (trained: ", trained_root_, " and ", sum(trained_units_), " in ",
               trained_units_.size(), "): that cannot be"));
  }
}

std::string Traced::text() const {
  char parameters[32];
  std::snprintf(parameters, sizeof parameters, "%.4g", static_cast<double>(parameters_) / 1e9);
  return cat(parameters, " B parameters: ", name_, ", traced in ", dtype_, ", in ", units_.size() + 1,
             units_.empty() ? " unit" : " units",
             trained_ < parameters_ ? cat("; ", parameters_ - trained_, " of them are frozen") : "");
}

nlohmann::ordered_json Traced::json() const {
  return {{"parameters", parameters_}, {"trained", trained_}, {"name", name_},
          {"dtype", dtype_},           {"root_unit", root_},  {"units", units_}};
}

std::string Traced::unit_of_batch(const Execution& /*run*/) const {
  return "rows of the script's batch";
}

void Traced::set_sizes(Facts& facts, int /*tensor*/, int /*expert*/) const {
  facts.parameters = parameters_;
  facts.trained = share_of(trained_, parameters_);
  facts.root_unit = root_;
  facts.largest_unit = units_.empty() ? 0 : std::ranges::max(units_);
  facts.trained_root = share_of(trained_root_, root_);
  facts.trained_unit = units_.empty() ? 1 : share_of(std::ranges::max(trained_units_), facts.largest_unit);
  facts.units = static_cast<int>(units_.size()) + 1;
}

Activations Traced::activations(const Execution& run) const {
  const auto rows = static_cast<double>(run.micro_batch);
  const double peak = pass(run).peak(rows), blocks = std::min(pass(run).blocks.at(rows), peak);
  return {.blocks = blocks, .head = peak - blocks};
}

ComputeTime Traced::compute_time(const Execution& run, const Machine& machine, const std::string& dtype) const {
  const Machine::Compute& rates = machine.of(dtype);
  const auto rows = static_cast<double>(run.micro_batch);
  const double again = run.recompute ? 4.0 / 3 : 1;
  ComputeTime time;
  time.products = again * weights_seconds(static_cast<double>(parameters_) * run.compute_bytes, rates);
  for (const Products& each : pass(run).products) {
    const double side = std::cbrt(each.multiplications * (each.batched ? 1 : rows));
    if (side > 0) time.products += 2 * each.multiplications * each.calls * rows / rates.products.at(side);
  }
  for (const Attention& each : pass(run).attention) {
    // Where it was not measured it is made of products.
    const Curve& curve = rates.attention.known() ? rates.attention : rates.products;
    time.attention += each.operations * rows / curve.at(static_cast<double>(each.tokens));
  }
  // What is no product passes through memory as often as it does in the blocks that were measured.
  const double of_units = kept_.blocks.at(rows), elsewhere = std::max(0.0, kept_.peak(rows) - of_units);
  if (rates.activations.known() && of_units > 0) {
    time.activations = again * of_units / rates.activations.at(of_units / static_cast<double>(units_.size()));
  }
  const Curve& loss = rates.loss.known() ? rates.loss : rates.activations;
  if (loss.known() && elsewhere > 0) time.head = elsewhere / loss.at(elsewhere);
  time.more = rates.share_more * time.total();
  return time;
}

}  // namespace tesserae::cost
