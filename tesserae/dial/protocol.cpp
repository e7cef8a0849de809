#include "tesserae/dial/protocol.h"

#include "tesserae/base/error.h"
#include "tesserae/mesh/strategy.h"

namespace tesserae::dial {
namespace {

constexpr std::string_view function = "dial";

int small_number(const Json& json, std::string_view what = "a degree") {
  if (!json.is_number_integer() || json < 1 || json > 1 << 20) {
    throw InvalidArgument(
        function, cat(what, " is a positive number, not ", json.dump(-1, ' ', true, Json::error_handler_t::replace)));
  }
  return json.get<int>();
}

Request::Tiers requested_tiers(const Json& json) {
  if (!json.is_object() || json.empty()) {
    throw InvalidArgument(function, R"(offload is a state and its tier, like {"optimizer": "disk"})");
  }
  Request::Tiers tiers;
  for (const auto& [state, tier] : json.items()) {
    if (!tier.is_string()) throw InvalidArgument(function, cat("the tier of ", state, " is device, host or disk"));
    auto* const asked = state == "parameters"  ? &tiers.parameters
                        : state == "gradients" ? &tiers.gradients
                        : state == "optimizer" ? &tiers.optimizer
                                               : nullptr;
    if (asked == nullptr) {
      throw InvalidArgument(function,
                            cat("there are the states parameters, gradients and optimizer, not '", state, "'"));
    }
    *asked = offload::tier_from_name(tier.get<std::string>());
  }
  return tiers;
}

}  // namespace

shard::Setting Request::from(const shard::Setting& now) const {
  return {.degrees = degrees.value_or(now.degrees),
          .tiers = {.parameters = tiers.parameters.value_or(now.tiers.parameters),
                    .gradients = tiers.gradients.value_or(now.tiers.gradients),
                    .optimizer = tiers.optimizer.value_or(now.tiers.optimizer)}};
}

Request parse_request(std::string_view line, int ranks) {
  const Json json = Json::parse(line, /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("ask") || !json["ask"].is_string()) {
    throw InvalidArgument(function, R"(a request is one line like {"ask": "turn", "degree": 4})");
  }
  const auto& ask = json["ask"].get_ref<const std::string&>();
  if (ask == "show") return {.kind = Request::Kind::show};
  if (ask == "auto") return {.kind = Request::Kind::automatic};
  if (ask == "scale") {
    return {.kind = Request::Kind::scale, .ranks = small_number(json.value("ranks", Json()), "ranks of a job: it")};
  }
  if (ask == "experts") {
    return {.kind = Request::Kind::experts, .experts = small_number(json.value("degree", Json()))};
  }
  if (ask != "turn") {
    throw InvalidArgument(function, cat("it can be asked to show, turn, auto, scale or experts, not '", ask, "'"));
  }
  Request request{.kind = Request::Kind::turn};
  const bool one = json.contains("degree"), three = json.contains("degrees"), tiers = json.contains("offload");
  if ((one && three) || (!one && !three && !tiers)) {
    throw InvalidArgument(function, "turn takes either degree or degrees, and offload beside them or alone");
  }
  if (one) request.degrees = mesh::from_hybrid_shard_degree(small_number(json["degree"]), ranks).degrees;
  if (three) request.degrees = mesh::Layout(ranks, degrees_from(json["degrees"])).degrees();
  if (tiers) request.tiers = requested_tiers(json["offload"]);
  return request;
}

Json to_json(const mesh::Degrees& degrees) {
  return {degrees.parameters, degrees.gradients, degrees.optimizer};
}

mesh::Degrees degrees_from(const Json& json) {
  if (!json.is_array() || json.size() != 3) {
    throw InvalidArgument(function, "degrees are three numbers: of parameters, gradients and optimizer state");
  }
  return {.parameters = small_number(json[0]), .gradients = small_number(json[1]), .optimizer = small_number(json[2])};
}

Json to_json(const offload::Tiers& tiers) {
  return {{"parameters", to_string(tiers.parameters)},
          {"gradients", to_string(tiers.gradients)},
          {"optimizer", to_string(tiers.optimizer)}};
}

offload::Tiers tiers_from(const Json& json) {
  return Request{.tiers = requested_tiers(json)}.from({}).tiers;
}

Json error_event(const std::string& message) {
  return {{"event", "error"}, {"message", message}};
}

bool is_last(const Json& event) {
  const std::string name = event.value("event", "");
  return name != "accepted" && name != "changed";
}

}  // namespace tesserae::dial
