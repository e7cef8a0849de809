#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tesserae/os/clock.h"
#include "tesserae/os/local_socket.h"

namespace tesserae::os {

/// Listens at a local socket in a thread of its own, so that a client is answered also while this process is busy.
///
///  1. A client connects and sends one request: one line.
///  2. The service answers it, at once or later (tell), with any number of lines, of which it calls one the last.
///  3. The connection is closed, within half a second. A client may close it earlier; what it asked for counts.
///
/// Whoever may write to the file may ask: it has mode 0600 and there is no other access. What a client does never harms
/// the others: a line that is too long or does not come is refused, one that does not read what it is told is dropped.
/// Lines are text without a line's end; what is in them is the service's.
class LineServer {
 public:
  struct Answer {
    std::vector<std::string> lines;
    bool last = true;  ///< the client is done; else it waits for what it is told
  };

  struct Service {
    std::string name;  ///< for the log: "the dial"
    /// Answers a request. Called from the server's thread, one at a time; nobody is served meanwhile, so what takes
    /// long is done elsewhere and told. Must not call the server. A request for which it throws is refused with the
    /// error's text.
    std::function<Answer(int64_t client, const std::string& line)> answer;
    /// The line that says why a client is not served (any longer). Same rules; also called by the destructor.
    std::function<std::string(const std::string& why)> refusal;
    std::string farewell;  ///< why, for those who still wait when the server goes: "the run has ended"

    size_t most_clients = 16;               ///< at a time
    size_t longest_request = 4096;          ///< bytes, without the line's end
    size_t most_unread = size_t{64} << 10;  ///< bytes that wait for a client beyond what its connection takes
    std::chrono::milliseconds arrival = std::chrono::seconds(10);  ///< for a request to come
  };

  /// Throws AddressInUse if somebody listens at `path`, IoError if there can be no socket.
  LineServer(const Path& path, Service service);
  /// Says farewell to those who wait, and takes the file away.
  ~LineServer();
  LineServer(const LineServer&) = delete;
  LineServer& operator=(const LineServer&) = delete;

  /// A line for a client that waits; after the answer to its request, and in order. `last`: the client is done. One
  /// that is gone is no error. Thread-safe; never waits for a client.
  void tell(int64_t client, std::string_view line, bool last);

 private:
  struct Client {
    int64_t id = 0;
    Descriptor connection;
    Deadline arrival;  // of its request
    std::string in, out;
    bool asked = false;  // its request has come
    bool done = false;   // it goes once `out` is sent
  };

  void run();
  std::chrono::nanoseconds patience() const;
  void accept();
  bool listens() const { return !refused_ || refused_->passed(); }
  void read(Client& client);
  void answer(Client& client);
  void refuse(Client& client, const std::string& why) { send(client, service_.refusal(why), true); }
  void send(Client& client, std::string_view line, bool last);
  void flush(Client& client);

  Service service_;
  std::mutex mutex_;  // of the clients
  std::vector<Client> clients_;
  int64_t next_id_ = 1;
  std::optional<Deadline> refused_;  // until then nobody is accepted; of the thread
  LocalListener listener_;
  Pipe stop_;  // closed to stop the thread
  std::jthread thread_;
};

}  // namespace tesserae::os
