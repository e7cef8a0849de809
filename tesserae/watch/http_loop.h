#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tesserae/os/clock.h"
#include "tesserae/os/tcp_listener.h"
#include "tesserae/os/wake_up.h"
#include "tesserae/watch/http.h"

namespace tesserae::watch {

/// What clients may take of this process.
struct HttpLimits {
  size_t connections = 128;                     ///< above that the one that waits longest for its request goes
  size_t unsent_bytes = 64 << 20;               ///< of all answers; above that the one that reads slowest goes
  std::chrono::milliseconds arrival{10'000};    ///< for a whole request, however it trickles in
  std::chrono::milliseconds idle{60'000};       ///< of a connection between requests
  std::chrono::milliseconds departure{60'000};  ///< for a whole answer
};

/// Serves HTTP on a listener until it is destroyed, with three threads that yield to all others:
///   - one waits for all connections at once and never blocks on any. A request reaches the others when it is complete,
///     so that a client which sends or reads slowly costs a descriptor and a few kB, and keeps nobody waiting;
///   - two call `handler` (so it is called from two threads at a time), for it may wait: for a disk, or for the run.
class HttpLoop {
 public:
  using Handler = std::function<HttpResponse(const HttpRequest&)>;

  /// What `handler` throws is answered with 500 and its text.
  HttpLoop(os::TcpListener listener, Handler handler, HttpLimits limits = {});
  /// Waits for handlers that run; whoever waits for an answer is hung up on.
  ~HttpLoop();
  HttpLoop(const HttpLoop&) = delete;
  HttpLoop& operator=(const HttpLoop&) = delete;

  const os::TcpListener& listener() const { return listener_; }

 private:
  struct Connection {
    int64_t id = 0;
    os::Descriptor socket;
    os::Deadline until;  // for what it does now
    std::string in, out;
    size_t sent = 0;       // of `out`; of one that is refused: what came since
    bool asked = false;    // a handler has its request
    bool begun = false;    // a part of a request has come
    bool last = false;     // it goes after this answer
    bool refused = false;  // what still comes from it is thrown away
  };
  struct Task {
    int64_t connection = 0;
    HttpRequest request;
  };
  struct Answer {
    int64_t connection = 0;
    std::string bytes;
    bool last = false;
  };

  void loop();
  void work();
  std::string answer(const HttpRequest& request) const;
  void accept();
  bool listens() const { return !refused_ || refused_->passed(); }
  void take_answers();
  void read(Connection& connection);
  void take(Connection& connection);
  void send(Connection& connection, std::string bytes, bool last);
  void flush(Connection& connection);
  void make_room();

  os::TcpListener listener_;
  Handler handler_;
  HttpLimits limits_;
  os::WakeUp wake_;

  std::list<Connection> connections_;  // of the loop's thread
  int64_t next_id_ = 1;
  std::optional<os::Deadline> refused_;  // until then nobody is accepted

  std::mutex mutex_;  // of all below
  std::condition_variable work_there_;
  std::deque<Task> tasks_;
  std::vector<Answer> answers_;
  bool stop_ = false;
  std::vector<std::jthread> threads_;  // the last member: they use all others
};

}  // namespace tesserae::watch
