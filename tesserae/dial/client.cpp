#include "tesserae/dial/client.h"

#include "tesserae/os/local_socket.h"

namespace tesserae::dial {

Client::Client(const os::Path& folder, const Json& request, const char* socket) : folder_(folder) {
  const std::string_view function = std::string_view(socket) == socket_name ? "dial" : "ask";
  if (os::files().status(folder).kind != os::FileKind::directory) {
    throw InvalidArgument(function, cat("there is no run folder ", folder.native()));
  }
  connection_ = os::connect_local(folder / socket);
  if (!connection_) {
    throw InvalidArgument(function, cat("no run listens in ", folder.native(),
                                        ": it has ended, or its rank 0 runs on another host (ask from there)"));
  }
  try {
    os::send_some(connection_.get(), request.dump() + "\n");  // fits in what a connection takes at once
  } catch (const IoError&) {
    // It has hung up already: next() says with which words.
  }
}

std::optional<Json> Client::next(const os::Deadline& deadline) {
  size_t end;
  while ((end = in_.find('\n')) == std::string::npos) {
    if (os::wait_readable({connection_.get()}, deadline).empty()) return std::nullopt;
    const std::string bytes = os::read_some(connection_.get());
    if (bytes.empty()) {
      throw IoError("dial", cat("the run in ", folder_.native(), " has ended before it answered"));
    }
    in_ += bytes;
  }
  Json event = Json::parse(in_.substr(0, end), /*cb=*/nullptr, /*allow_exceptions=*/false);
  in_.erase(0, end + 1);
  if (!event.is_object() || !event.contains("event")) {
    throw IoError("dial", cat("what listens in ", folder_.native(), " is no run"));
  }
  return event;
}

}  // namespace tesserae::dial
