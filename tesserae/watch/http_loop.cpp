#include "tesserae/watch/http_loop.h"

#include <algorithm>

#include "tesserae/base/log.h"
#include "tesserae/os/thread.h"

namespace tesserae::watch {
namespace {

constexpr int workers = 2;
constexpr std::chrono::milliseconds tick(500);  // how late a deadline may be seen
constexpr std::chrono::seconds parting(2);      // for a client that is refused to hear so
constexpr size_t most_thrown_away = 2 << 20;    // of what it sends meanwhile

}  // namespace

HttpLoop::HttpLoop(os::TcpListener listener, Handler handler, HttpLimits limits)
    : listener_(std::move(listener)), handler_(std::move(handler)), limits_(limits) {
  threads_.emplace_back([this] { loop(); });
  for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
}

HttpLoop::~HttpLoop() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  work_there_.notify_all();
  wake_.wake();
  threads_.clear();
}

void HttpLoop::loop() {
  os::yield_to_others();
  while (true) {
    std::vector<os::Waited> waited = {{.descriptor = wake_.descriptor(), .to_read = true},
                                      {.descriptor = listens() ? listener_.descriptor() : -1, .to_read = true}};
    // Who is being answered is not read from: a client cannot fill this process with requests that nobody takes.
    for (const Connection& connection : connections_) {
      const bool sends = !connection.out.empty();
      waited.push_back(
          {.descriptor = connection.asked ? -1 : connection.socket.get(), .to_read = !sends, .to_write = sends});
    }
    try {
      const bool alone = connections_.empty() && listens();
      os::wait_ready(waited, os::Deadline(alone ? std::chrono::nanoseconds(std::chrono::hours(1)) : tick));
      {
        const std::scoped_lock lock(mutex_);
        if (stop_) return;
      }
      wake_.clear();
      size_t i = 2;
      for (Connection& connection : connections_) {
        const os::Waited& ready = waited[i++];
        if (ready.readable && ready.to_read) read(connection);
        if (ready.writable && ready.to_write) flush(connection);
      }
      take_answers();
      connections_.remove_if([](const Connection& connection) {
        return !connection.socket || (!connection.asked && connection.until.passed());
      });
      if (waited[1].readable) accept();
    } catch (const std::exception& error) {
      log(LogLevel::error, cat("the page is no longer served: ", error.what()));
      return;
    }
  }
}

void HttpLoop::accept() {
  while (true) {
    os::Descriptor socket;
    try {
      socket = listener_.accept();
    } catch (const IoError& error) {
      // This process has no descriptor left, say. It may have some again; training needs them more.
      if (!refused_) log(LogLevel::warning, cat("the page is not served for now: ", error.what()));
      refused_.emplace(tick);
      return;
    }
    if (!socket) return;
    refused_.reset();
    connections_.push_back({.id = next_id_++, .socket = std::move(socket), .until = os::Deadline(limits_.arrival)});
    if (connections_.size() > limits_.connections) make_room();
  }
}

void HttpLoop::make_room() {
  auto oldest = connections_.end();
  for (auto it = connections_.begin(); it != std::prev(connections_.end()); ++it) {
    if (it->asked || !it->out.empty()) continue;
    if (oldest == connections_.end() || it->until.remaining() < oldest->until.remaining()) oldest = it;
  }
  connections_.erase(oldest == connections_.end() ? std::prev(oldest) : oldest);
}

void HttpLoop::read(Connection& connection) {
  try {
    const std::string bytes = os::read_some(connection.socket.get(), most_head_bytes);
    if (bytes.empty()) return connection.socket.reset();  // it hung up
    if (connection.refused) {
      connection.sent += bytes.size();
      if (connection.sent > most_thrown_away) connection.socket.reset();
      return;
    }
    connection.in += bytes;
    take(connection);
  } catch (const IoError&) {
    connection.socket.reset();
  }
}

void HttpLoop::take(Connection& connection) {
  try {
    if (!connection.begun && !connection.in.empty()) {
      connection.begun = true;
      connection.until = os::Deadline(limits_.arrival);
    }
    std::optional<HttpRequest> request = take_request(connection.in);
    if (!request) return;
    connection.asked = true;
    {
      const std::scoped_lock lock(mutex_);
      tasks_.push_back({.connection = connection.id, .request = std::move(*request)});
    }
    work_there_.notify_one();
  } catch (const BadRequest& error) {
    // A connection that is closed while more comes is reset, and the answer may be lost with it.
    connection.refused = true;
    send(connection, to_bytes(refusal(error.status(), error.what()), /*keep_alive=*/false), /*last=*/true);
  }
}

void HttpLoop::work() {
  os::yield_to_others();
  std::unique_lock lock(mutex_);
  while (true) {
    work_there_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (stop_) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::string bytes = answer(task.request);
    lock.lock();
    answers_.push_back({task.connection, std::move(bytes), !task.request.keep_alive});
    wake_.wake();
  }
}

std::string HttpLoop::answer(const HttpRequest& request) const {
  const bool head = request.method == "HEAD";
  try {
    return to_bytes(handler_(request), request.keep_alive, head);
  } catch (const std::exception& error) {
    return to_bytes(refusal(500, error.what()), request.keep_alive, head);
  }
}

void HttpLoop::take_answers() {
  std::vector<Answer> answers;
  {
    const std::scoped_lock lock(mutex_);
    answers.swap(answers_);
  }
  for (Answer& answer : answers) {
    const auto connection = std::ranges::find(connections_, answer.connection, &Connection::id);
    if (connection == connections_.end()) continue;
    connection->asked = connection->begun = false;
    send(*connection, std::move(answer.bytes), answer.last);
  }
}

void HttpLoop::send(Connection& connection, std::string bytes, bool last) {
  connection.out = std::move(bytes);
  connection.sent = 0;
  connection.last = last;
  connection.until = os::Deadline(limits_.departure);
  flush(connection);
  size_t unsent = 0;
  for (const Connection& other : connections_) unsent += other.out.size();
  if (unsent <= limits_.unsent_bytes) return;
  const auto slowest = std::ranges::min_element(connections_, {}, [](const Connection& other) {
    return other.out.empty() ? std::chrono::nanoseconds::max() : other.until.remaining();
  });
  slowest->socket.reset();
  slowest->out.clear();
}

void HttpLoop::flush(Connection& connection) {
  try {
    while (connection.sent < connection.out.size()) {
      const size_t sent =
          os::send_some(connection.socket.get(), std::string_view(connection.out).substr(connection.sent));
      if (sent == 0) return;
      connection.sent += sent;
    }
  } catch (const IoError&) {
    connection.socket.reset();
    return;
  }
  connection.out = {};
  connection.sent = 0;
  if (connection.refused) {
    connection.until = os::Deadline(parting);
    return;
  }
  if (connection.last) return connection.socket.reset();
  connection.until = os::Deadline(limits_.idle);
  if (!connection.in.empty()) take(connection);  // the next request came with this one
}

}  // namespace tesserae::watch
