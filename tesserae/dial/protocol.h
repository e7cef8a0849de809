#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tesserae/mesh/layout.h"

namespace tesserae::dial {

using Json = nlohmann::ordered_json;

// What is said through the socket `dial.sock` of a run folder. One JSON object a line, one request a connection.
//
//  1. The client asks: {"ask": "show"}, {"ask": "auto"}, {"ask": "turn", "degree": 4} or
//     {"ask": "turn", "degrees": [1, 2, 4]} (parameters, gradients, optimizer).
//  2. The run answers with events; the last one of a request is marked (*):
//       {"event": "error", "message": "..."} (*)         nothing was or will be done
//       {"event": "status", ...} (*)                      of show: see Dial::status
//       {"event": "automatic"} (*)                        of auto: the tuner has the dial
//       {"event": "unchanged", "degrees": [..]} (*)       of turn: they are in use already
//       {"event": "accepted", "degrees": [..]}            of turn: will be done at the next step edge
//       {"event": "changed", "step", "from", "to", "seconds", "bytes"}
//       {"event": "timed", "step", "step_seconds", "step_seconds_before"} (*)   the second step with the new degrees
//  3. The client closes the connection. One that does so earlier takes nothing back.

inline constexpr const char* socket_name = "dial.sock";
inline constexpr size_t longest_line = 4096;

struct Request {
  enum class Kind { show, automatic, turn };
  Kind kind = Kind::show;
  mesh::Degrees degrees;  ///< of turn
};

/// Throws InvalidArgument for what is no request, and for degrees that do not fit `ranks`, naming the nearest.
Request parse_request(std::string_view line, int ranks);

Json to_json(const mesh::Degrees& degrees);
/// Of an array of three numbers; throws InvalidArgument for anything else.
mesh::Degrees degrees_from(const Json& json);

Json error_event(const std::string& message);
/// True for the events marked (*).
bool is_last(const Json& event);

}  // namespace tesserae::dial
