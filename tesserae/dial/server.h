#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tesserae/dial/protocol.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/local_socket.h"

namespace tesserae::dial {

/// Listens at `FOLDER/dial.sock` for requests from outside (protocol.h), in a thread of its own, so that a client is
/// answered also while a step is long. Rank 0's.
///
/// Whoever may write to the file may ask: it has mode 0600 and there is no other access. Limits: 16 clients at a time,
/// a line of 4096 bytes, 10 s for a request to arrive; a client that does not read what it is told is dropped.
class Server {
 public:
  /// Requests must fit `ranks`. Throws os::AddressInUse if a live run has that folder, IoError if there can be no
  /// socket.
  Server(const os::Path& folder, int ranks);
  /// Tells those who wait that the run has ended, and takes the file away.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  struct Asked {
    int64_t client = 0;
    Request request;
  };
  /// What was asked for since the last call, in order; `show` is answered by the server itself.
  std::vector<Asked> take();
  /// An event for a client; if it is the last one of its request, the client is done. One that is gone is no error.
  void tell(int64_t client, const Json& event);
  /// What `show` answers from now on.
  void set_status(const Json& status);

 private:
  struct Client {
    int64_t id = 0;
    os::Descriptor connection;
    os::Deadline arrival;  // of its request
    std::string in, out;
    bool asked = false;  // its request has come
    bool done = false;   // it goes once `out` is sent
  };

  void run();
  void accept();
  bool listens() const { return !refused_ || refused_->passed(); }
  void read(Client& client);
  void answer(Client& client);
  static void send(Client& client, const Json& event);
  static void flush(Client& client);

  int ranks_;
  std::mutex mutex_;  // of all below that both threads use
  std::vector<Client> clients_;
  std::vector<Asked> asked_;
  Json status_ = {{"event", "status"}, {"step", nullptr}};
  int64_t next_id_ = 1;
  std::optional<os::Deadline> refused_;  // until then nobody is accepted; of the thread
  os::LocalListener listener_;
  os::Pipe stop_;  // closed to stop the thread
  std::jthread thread_;
};

}  // namespace tesserae::dial
