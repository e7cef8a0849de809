#pragma once

#include <map>
#include <optional>
#include <string>

#include "tesserae/launch/launcher.h"
#include "tesserae/os/packet_socket.h"
#include "tesserae/os/process.h"

namespace tesserae::launch {

class Ending;

/// The process that makes ranks on this host by copying itself, with what it has loaded: LocalJob::fork_server, started
/// when the first rank is wanted. Whoever it makes is this process's child. Used from the launcher's thread.
class ForkServer {
 public:
  /// Both outlive it.
  ForkServer(const LocalJob& job, const Ending& ending) : job_(job), ending_(ending) {}

  /// A rank with these variables beside those of the server, in a process group of its own, killed with this process.
  /// What it writes to standard error, and `all` of what it writes, goes to `output`. Waits until the server has loaded
  /// what it is to load. Nothing: there is no server (any more), it cannot be used, or this process was asked to end.
  std::optional<os::Process> make(const std::map<std::string, std::string>& environment, int output, bool all);

 private:
  void start();
  /// What the server says of what it was asked for; nothing: it will not say.
  std::optional<std::string> answer();
  /// It makes no more ranks.
  void give_up(const std::string& why);

  const LocalJob& job_;
  const Ending& ending_;
  bool given_up_ = false;
  os::Descriptor connection_;
  std::optional<os::Process> process_;
};

}  // namespace tesserae::launch
