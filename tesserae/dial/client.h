#pragma once

#include <optional>
#include <string>

#include "tesserae/dial/protocol.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/files.h"

namespace tesserae::dial {

/// One request to a run through a socket of its folder, from a process of the same user on the host of its rank 0.
///
///   Client client(run_folder, {{"ask", "turn"}, {"degree", 4}});
///   while (auto event = client.next(deadline)) ...      // until is_last(*event)
class Client {
 public:
  /// Asks at `socket`: dial.sock, or another that speaks in lines of JSON. Throws InvalidArgument if there is no such
  /// folder, or no run that listens in it; IoError where the system refuses (the run belongs to another user).
  Client(const os::Path& folder, const Json& request, const char* socket = socket_name);

  /// The next event; nothing: the deadline has passed. Throws IoError if the run ends the connection.
  std::optional<Json> next(const os::Deadline& deadline);

 private:
  os::Path folder_;
  os::Descriptor connection_;
  std::string in_;
};

}  // namespace tesserae::dial
