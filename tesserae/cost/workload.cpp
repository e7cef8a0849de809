#include "tesserae/cost/workload.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"
#include "tesserae/cost/job_facts.h"

namespace tesserae::cost {

Transformer::Transformer(const model::GptConfig& model) : model_(resolved(model)) {}

std::string Transformer::text() const {
  char parameters[32];
  std::snprintf(parameters, sizeof parameters, "%.4g", static_cast<double>(model::sizes(model_).total) / 1e9);
  return cat(parameters, " B parameters: ", model_.layers, " layers of dimension ", model_.dimension, ", ",
             model_.heads, " heads (", model_.kv_heads, " of keys and values), feed-forward ", model_.feed_forward,
             model_.experts == 0 ? "" : cat(" of each of ", model_.experts, " experts, ", model_.experts_per_token),
             model_.experts == 0 ? "" : " a token",
             model_.shared_experts == 0 ? "" : cat(" and ", model_.shared_experts, " for all"), ", vocabulary ",
             model_.vocabulary, model_.tied ? ", head tied" : "");
}

nlohmann::ordered_json Transformer::json() const {
  return {{"parameters", model::sizes(model_).total},
          {"layers", model_.layers},
          {"dimension", model_.dimension},
          {"heads", model_.heads},
          {"kv_heads", model_.kv_heads},
          {"feed_forward", model_.feed_forward},
          {"experts", model_.experts},
          {"experts_per_token", model_.experts == 0 ? 0 : model_.experts_per_token},
          {"shared_experts", model_.shared_experts},
          {"vocabulary", model_.vocabulary},
          {"tied", model_.tied}};
}

std::string Transformer::unit_of_batch(const Execution& run) const {
  return cat("sequences of ", run.sequence, " tokens");
}

bool Transformer::can_split(int tensor) const {
  return model_.heads % tensor == 0 && model_.kv_heads % tensor == 0 && model_.feed_forward % tensor == 0;
}

void Transformer::set_sizes(Facts& facts, int tensor, int expert) const {
  set_model(facts, model_, tensor, expert);
}

Activations Transformer::activations(const Execution& run) const {
  return activations_of(model_, run);
}

ComputeTime Transformer::compute_time(const Execution& run, const Machine& machine, const std::string& dtype) const {
  return cost::compute_time(model_, run, machine, dtype);
}

AxisTraffic Transformer::tensor_traffic(const Execution& run) const {
  return tensor_traffic_of(model_, run);
}

AxisTraffic Transformer::context_traffic(const Execution& run) const {
  return context_traffic_of(model_, run);
}

AxisTraffic Transformer::expert_traffic(const Execution& run) const {
  return expert_traffic_of(model_, run);
}

double Transformer::workspace(const Execution& run, const Machine::Workspaces& kept) const {
  if (!kept.bytes.known()) return 0;
  double most = 0;
  const auto layer = [&](double tokens, double in, double out) {  // its result, and both gradients
    most = std::max(
        {most, kept.elements(tokens, in, out), kept.elements(tokens, out, in), kept.elements(out, tokens, in)});
  };
  const double d = static_cast<double>(model_.dimension), T = run.tensor;
  const double f = static_cast<double>(model_.feed_forward) / T, tokens = run.tokens();
  layer(tokens, d, d / T);
  layer(tokens, d / T, d);
  layer(tokens, d, static_cast<double>(round_up(model_.vocabulary, run.tensor)) / T);
  if (model_.experts == 0 || model_.shared_experts > 0) {
    const double width = model_.experts == 0 ? f : static_cast<double>(model_.shared_experts) * f;
    layer(tokens, d, width);
    layer(tokens, width, d);
  }
  if (model_.experts > 0) {
    const double of_expert =
        tokens * static_cast<double>(model_.experts_per_token) * run.expert / static_cast<double>(model_.experts);
    layer(of_expert, d, f);
    layer(of_expert, f, d);
  }
  return most > 0 ? kept.bytes.at(most) : 0;
}

}  // namespace tesserae::cost
