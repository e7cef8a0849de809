#pragma once

#include <map>
#include <optional>
#include <string>

#include "tesserae/launch/launcher.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/process.h"

namespace tesserae::launch {

class Ending;

/// The process that makes ranks on this host by copying itself, with what it has loaded: LocalJob::fork_server. Whoever
/// it makes is this process's child. Where it does not work there is none, and TESSERAE_LOG=info says why. Used from
/// the launcher's thread.
class ForkServer {
 public:
  /// Both outlive it.
  ForkServer(const LocalJob& job, const Ending& ending) : job_(job), ending_(ending) {}

  /// Starts it, if the job has one, and waits until it has loaded what it is to load, or this process is asked to end.
  /// Before anybody waits for this host: that may take long.
  void start();

  /// A rank with these variables beside those of the server, in a process group of its own, killed with this process.
  /// What it writes to standard error, and `all` of what it writes, goes to `output`. Nothing: there is no server.
  std::optional<os::Process> make(const std::map<std::string, std::string>& environment, int output, bool all);

 private:
  std::optional<os::Process> order(const std::map<std::string, std::string>& environment, int output, bool all);
  /// There is something to read, or its other side is gone. False: this process was asked to end before.
  bool wait(int descriptor) const;
  /// Of one that has said nothing.
  std::string how_it_ended();
  /// It makes no more ranks. `why`: empty if nobody needs to know.
  void give_up(const std::string& why);

  const LocalJob& job_;
  const Ending& ending_;
  os::Descriptor connection_;  // unset: there is none
  std::optional<os::Process> process_;
};

}  // namespace tesserae::launch
