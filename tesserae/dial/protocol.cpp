#include "tesserae/dial/protocol.h"

#include "tesserae/base/error.h"
#include "tesserae/mesh/strategy.h"

namespace tesserae::dial {
namespace {

constexpr std::string_view function = "dial";

int small_number(const Json& json) {
  if (!json.is_number_integer() || json < 1 || json > 1 << 20) {
    throw InvalidArgument(
        function, cat("a degree is a positive number, not ", json.dump(-1, ' ', true, Json::error_handler_t::replace)));
  }
  return json.get<int>();
}

}  // namespace

Request parse_request(std::string_view line, int ranks) {
  const Json json = Json::parse(line, /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("ask") || !json["ask"].is_string()) {
    throw InvalidArgument(function, R"(a request is one line like {"ask": "turn", "degree": 4})");
  }
  const auto& ask = json["ask"].get_ref<const std::string&>();
  if (ask == "show") return {.kind = Request::Kind::show, .degrees = {}};
  if (ask == "auto") return {.kind = Request::Kind::automatic, .degrees = {}};
  if (ask != "turn") throw InvalidArgument(function, cat("it can be asked to show, turn or auto, not '", ask, "'"));
  Request request{.kind = Request::Kind::turn, .degrees = {}};
  if (json.contains("degree") == json.contains("degrees")) {
    throw InvalidArgument(function, "turn takes either degree or degrees");
  }
  request.degrees = json.contains("degree")
                        ? mesh::from_hybrid_shard_degree(small_number(json["degree"]), ranks).degrees
                        : mesh::Layout(ranks, degrees_from(json["degrees"])).degrees();
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

Json error_event(const std::string& message) {
  return {{"event", "error"}, {"message", message}};
}

bool is_last(const Json& event) {
  const std::string name = event.value("event", "");
  return name != "accepted" && name != "changed";
}

}  // namespace tesserae::dial
