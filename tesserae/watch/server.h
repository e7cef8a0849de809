#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "tesserae/os/files.h"

namespace tesserae::watch {

struct ServerOptions {
  std::string host = "127.0.0.1";  ///< who can connect: "127.0.0.1" this host's processes, "0.0.0.0" the whole network
  uint16_t port = 0;               ///< 0: the system chooses
  std::string token;  ///< who does not name it sees nothing; made where it is empty and others can connect, or control
  bool allow_control = false;                  ///< the page may turn the dial
  bool begins = false;                         ///< the run writes its first file soon: its folder may be empty
  std::chrono::milliseconds patience{10'000};  ///< for a request to arrive
};

/// Serves the page of a run, and what it is made of, until it is destroyed.
///
///   watch::Server server("runs/job", {.port = 8265});
///   std::cout << server.url();
///
/// It only reads files (run_folder.h) and, with allow_control, hands requests on to the run's dial: so it serves a run
/// that lives, one that is over, and one of another process alike. In the process that trains it costs three threads
/// that sleep while nobody asks, and never more than HttpLimits (http_loop.h) of memory and descriptors.
///
/// The addresses, all of them, and who may use them: docs/monitor.md. Nothing of an address is ever a path.
class Server {
 public:
  /// Throws InvalidArgument if there is no such folder or nothing of a run in it, or for a token that an address
  /// cannot carry; os::AddressInUse if the port is taken, IoError if it cannot listen there.
  explicit Server(const os::Path& folder, const ServerOptions& options = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// To open in a browser: "http://127.0.0.1:8265/", with the token if there is one.
  std::string url() const;
  uint16_t port() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tesserae::watch
