#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "tesserae/dial/protocol.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/files.h"

namespace tesserae::dial {

/// One request to a run through a socket of its folder, from a process of the same user on the host of its rank 0.
///
///   Client client(run_folder, {{"ask", "turn"}, {"degree", 4}}, deadline);
///   while (auto event = client.next(deadline)) ...      // until is_last(*event)
///
/// A job whose ranks survive losses may have nobody who listens for a moment: rank 0 is being replaced, or the ranks
/// meet again. As long as its launcher lives the client waits for whoever listens next, and asks again what was not
/// answered at all. What had been accepted may kill a rank each time, so that is not asked again: an error says so.
/// Used from one thread.
class Client {
 public:
  /// Asks at `socket`: dial.sock, or another that speaks in lines of JSON. Throws InvalidArgument if there is no such
  /// folder, or no run that listens in it; IoError where the system refuses (the run belongs to another user), or if
  /// the job goes on but nobody has listened until the deadline.
  Client(const os::Path& folder, const Json& request,
         const os::Deadline& deadline = os::Deadline(std::chrono::milliseconds(0)), const char* socket = socket_name);

  /// The next event; nothing: the deadline has passed. Throws IoError if the run has ended without one.
  std::optional<Json> next(const os::Deadline& deadline);

 private:
  enum class Found { somebody, nobody_yet, no_job };
  Found connect(const os::Deadline& deadline);
  void drop();
  bool receive(const os::Deadline& deadline);

  os::Path folder_, socket_;
  std::string request_;
  bool heard_ = false;  // an event of this request
  bool lost_ = false;   // who had answered so was lost before the last event
  os::Descriptor connection_;
  std::string in_;
};

}  // namespace tesserae::dial
