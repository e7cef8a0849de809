#include "tesserae/dial/client.h"

#include "tesserae/dial/launcher_file.h"
#include "tesserae/os/local_socket.h"

namespace tesserae::dial {
namespace {

constexpr std::chrono::milliseconds look_every(20);
constexpr const char* changes_nothing = "{\"ask\": \"show\"}\n";

}  // namespace

Client::Client(const os::Path& folder, const Json& request, const os::Deadline& deadline, const char* socket)
    : folder_(folder), socket_(folder / socket), request_(request.dump() + "\n") {
  const std::string_view function = std::string_view(socket) == socket_name ? "dial" : "ask";
  if (os::files().status(folder).kind != os::FileKind::directory) {
    throw InvalidArgument(function, cat("there is no run folder ", folder.native()));
  }
  switch (connect(deadline)) {
    case Found::somebody:
      return;
    case Found::no_job:
      throw InvalidArgument(function, cat("no run listens in ", folder.native(),
                                          ": it has ended, or its rank 0 runs on another host (ask from there)"));
    case Found::nobody_yet:
      throw IoError(function, cat("the launcher of the run in ", folder.native(), " lives, but nobody listens at ",
                                  socket_.native(), " (yet): its ranks meet again after a loss, it ends, or it was ",
                                  "told not to listen; wait longer (--wait), or see what it says"));
  }
}

/// To whoever listens, or will before the deadline. Asks what was not answered at all; else something that changes
/// nothing, since a process that is just ending may still take a connection.
Client::Found Client::connect(const os::Deadline& deadline) {
  for (;;) {
    // In this order: between the two looks somebody may begin to listen, and end.
    const bool goes_on = launcher_lives(folder_);
    connection_ = os::connect_local(socket_);
    if (connection_) break;
    if (!goes_on) return Found::no_job;
    if (deadline.passed()) return Found::nobody_yet;
    os::sleep_for(look_every);
  }
  try {
    // Fits in what a connection takes at once.
    os::send_some(connection_.get(), lost_ ? changes_nothing : request_);
  } catch (const IoError&) {
    // It has hung up already: next() says with which words.
  }
  return Found::somebody;
}

/// Whoever listened does so no longer.
void Client::drop() {
  connection_.reset();
  in_.clear();
  lost_ = heard_;
}

/// Until there is a line, or the deadline has passed. False: whoever listened is gone.
bool Client::receive(const os::Deadline& deadline) {
  while (in_.find('\n') == std::string::npos) {
    if (os::wait_readable({connection_.get()}, deadline).empty()) return true;
    try {
      const std::string bytes = os::read_some(connection_.get());
      if (bytes.empty()) return false;
      in_ += bytes;
    } catch (const IoError&) {
      return false;  // it was killed before it had read what it was asked
    }
  }
  return true;
}

std::optional<Json> Client::next(const os::Deadline& deadline) {
  for (std::optional<Json> farewell;;) {
    if (!connection_) {
      const Found found = connect(deadline);
      if (found == Found::nobody_yet) return std::nullopt;
      if (found == Found::no_job && farewell) return farewell;
      if (found == Found::no_job) {
        throw IoError("dial", cat("the run in ", folder_.native(), " has ended before it answered"));
      }
    }
    if (!receive(deadline)) {
      drop();
      if (deadline.passed()) return std::nullopt;
      os::sleep_for(look_every);
      continue;
    }
    const size_t end = in_.find('\n');
    if (end == std::string::npos) return std::nullopt;
    Json event = Json::parse(in_.substr(0, end), /*cb=*/nullptr, /*allow_exceptions=*/false);
    in_.erase(0, end + 1);
    if (!event.is_object() || !event.contains("event")) {
      throw IoError("dial", cat("what listens in ", folder_.native(), " is no run"));
    }
    if (event == error_event(run_ended)) {
      farewell = event;
      drop();
      continue;
    }
    if (lost_) {
      return error_event("the run has lost a rank before this was done, and goes on: ask again if it was not done");
    }
    heard_ = true;
    return event;
  }
}

}  // namespace tesserae::dial
