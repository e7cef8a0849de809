#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "tesserae/dial/protocol.h"
#include "tesserae/os/line_server.h"

namespace tesserae::dial {

/// Listens at `FOLDER/dial.sock` for requests from outside (protocol.h). Rank 0's. Limits: 16 clients at a time, a line
/// of 4096 bytes, 10 s for a request to arrive; a client that does not read what it is told is dropped.
class Server {
 public:
  /// Requests must fit `ranks`. Throws os::AddressInUse if a live run has that folder, IoError if there can be no
  /// socket. Notes this process's launcher in the folder (launcher_file.h). Destroyed, it tells those who wait that the
  /// run has ended.
  Server(const os::Path& folder, int ranks);

  struct Asked {
    int64_t client = 0;
    Request request;
  };
  /// What was asked for since the last call, in order; `show` is answered by the server itself.
  std::vector<Asked> take();
  /// An event for a client; if it is the last one of its request, the client is done. One that is gone is no error.
  void tell(int64_t client, const Json& event);
  /// The job has another number of ranks, which requests must fit.
  void set_ranks(int ranks);
  /// What `show` answers from now on.
  void set_status(const Json& status);

 private:
  os::LineServer::Answer answer(int64_t client, const std::string& line);

  std::mutex mutex_;  // of the three below
  int ranks_;
  std::vector<Asked> asked_;
  Json status_ = {{"event", "status"}, {"step", nullptr}};
  os::LineServer lines_;
};

}  // namespace tesserae::dial
