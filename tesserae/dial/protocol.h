#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "tesserae/shard/setting.h"

namespace tesserae::dial {

using Json = nlohmann::ordered_json;

// What is said through the socket `dial.sock` of a run folder. One JSON object a line, one request a connection.
//
//  1. The client asks: {"ask": "show"}, {"ask": "auto"}, {"ask": "turn", "degree": 4},
//     {"ask": "turn", "degrees": [1, 2, 4]} (parameters, gradients, optimizer) or
//     {"ask": "turn", "offload": {"optimizer": "disk"}}: tiers (device, host, disk) of some of the three, beside
//     degrees or alone. What is not named stays. {"ask": "scale", "ranks": 2}: another number of ranks.
//     {"ask": "experts", "degree": 4}: over how many ranks experts are shared out.
//  2. The run answers with events; the last one of a request is marked (*):
//       {"event": "error", "message": "..."} (*)         nothing was or will be done
//       {"event": "status", ...} (*)                      of show: see Dial::status
//       {"event": "automatic"} (*)                        of auto: the tuner has the dial
//       {"event": "unchanged", "degrees": [..], "offload": {..}} (*)   of turn: they are in use already
//       {"event": "accepted", "degrees": [..]}            of turn: will be done at the next step edge; degrees: if
//       asked. Of scale: "ranks", of experts: "experts" instead; the run may still refuse
//       {"event": "changed", "step", "from", "to", "offload_from", "offload_to", "seconds", "bytes"}
//       {"event": "timed", "step", "step_seconds", "step_seconds_before"} (*)   the second step with the new degrees
//       {"event": "scaled", "step", "from", "to", "degrees": [..], "seconds"} (*)   of scale: on so many ranks the run
//       goes on, or (from = to) it had them already
//       {"event": "shared_out", "step", "from", "to", "degrees": [..], "seconds"} (*)   of experts: the same of them
//  3. The client closes the connection. One that does so earlier takes nothing back.
//
// A request says what is to be, so asking twice is as good as once: a client that was not answered at all asks again
// where its job goes on (client.h).

inline constexpr const char* socket_name = "dial.sock";
inline constexpr size_t longest_line = 4096;

struct Request {
  enum class Kind { show, automatic, turn, scale, experts };
  /// Of turn; unset: as it is.
  struct Tiers {
    std::optional<offload::Tier> parameters = {}, gradients = {}, optimizer = {};
  };
  Kind kind = Kind::show;
  std::optional<mesh::Degrees> degrees = {};
  Tiers tiers = {};
  int ranks = 0;    ///< of scale
  int experts = 0;  ///< of experts

  /// What a turn of the dial from `now` comes to.
  shard::Setting from(const shard::Setting& now) const;
};

/// Throws InvalidArgument for what is no request, for degrees that do not fit `ranks`, naming the nearest, and for
/// names of no state or no tier.
Request parse_request(std::string_view line, int ranks);

Json to_json(const mesh::Degrees& degrees);
/// {"parameters": "device", "gradients": "device", "optimizer": "disk"}
Json to_json(const offload::Tiers& tiers);
/// Of such an object; what is missing is on the device.
offload::Tiers tiers_from(const Json& json);
/// Of an array of three numbers; throws InvalidArgument for anything else.
mesh::Degrees degrees_from(const Json& json);

Json error_event(const std::string& message);
/// The message of those who still wait when a rank 0 no longer listens. Its job may go on (launcher_file.h).
inline constexpr const char* run_ended = "the run has ended";
/// True for the events marked (*).
bool is_last(const Json& event);

}  // namespace tesserae::dial
