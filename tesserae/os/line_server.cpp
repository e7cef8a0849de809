#include "tesserae/os/line_server.h"

#include <algorithm>
#include <utility>

#include "tesserae/base/log.h"

namespace tesserae::os {
namespace {

constexpr std::chrono::milliseconds tick(500);        // for deadlines
constexpr std::chrono::milliseconds unsent_tick(20);  // while a connection has not taken all

}  // namespace

LineServer::LineServer(const Path& path, Service service)
    : service_(std::move(service)), listener_(path), stop_(make_pipe()), thread_([this] { run(); }) {}

LineServer::~LineServer() {
  stop_.write.reset();
  thread_.join();
  for (Client& client : clients_) {
    if (client.asked && !client.done) refuse(client, service_.farewell);
    flush(client);
  }
}

void LineServer::run() {
  while (true) {
    std::vector<int> waiting = {stop_.read.get()};
    if (listens()) waiting.push_back(listener_.descriptor());
    const std::chrono::nanoseconds at_most = [&] {
      const std::scoped_lock lock(mutex_);
      for (const Client& client : clients_) waiting.push_back(client.connection.get());
      return patience();
    }();
    try {
      const std::vector<int> ready = wait_readable(waiting, Deadline(at_most));
      const auto is_ready = [&ready](int descriptor) { return std::ranges::find(ready, descriptor) != ready.end(); };
      if (is_ready(stop_.read.get())) return;
      const std::scoped_lock lock(mutex_);
      for (Client& client : clients_) {
        if (is_ready(client.connection.get())) read(client);
        flush(client);
      }
      std::erase_if(clients_, [](const Client& client) {
        return !client.connection || (client.done && client.out.empty()) || (!client.asked && client.arrival.passed());
      });
      if (is_ready(listener_.descriptor())) accept();
    } catch (const Error& error) {
      log(LogLevel::error, cat(service_.name, " takes no more requests: ", error.what()));
      return;
    }
  }
}

/// How long nothing needs to be done unless somebody comes or says something.
std::chrono::nanoseconds LineServer::patience() const {
  const bool unsent = std::ranges::any_of(clients_, [](const Client& client) { return !client.out.empty(); });
  if (unsent) return unsent_tick;
  if (!clients_.empty() || !listens()) return tick;
  return std::chrono::hours(1);
}

void LineServer::accept() {
  const auto next = [this]() -> Descriptor {
    try {
      Descriptor connection = listener_.accept();
      if (connection) refused_.reset();
      return connection;
    } catch (const IoError& error) {
      // This process has no descriptor left, say. It may have some again, and whoever asks waits at the socket.
      if (!refused_) log(LogLevel::warning, cat(service_.name, " takes no requests for now: ", error.what()));
      refused_.emplace(tick);
      return {};
    }
  };
  while (Descriptor connection = next()) {
    clients_.push_back({.id = next_id_++,
                        .connection = std::move(connection),
                        .arrival = Deadline(service_.arrival),
                        .in = {},
                        .out = {}});
    if (clients_.size() <= service_.most_clients) continue;
    refuse(clients_.back(), cat(service_.most_clients, " others are being served; try again"));
    clients_.pop_back();
  }
}

void LineServer::read(Client& client) {
  try {
    const std::string bytes = read_some(client.connection.get(), service_.longest_request + 1);
    if (bytes.empty()) return client.connection.reset();  // it hung up
    if (client.asked) return;                             // one request a connection
    client.in += bytes;
    const size_t end = client.in.find('\n');
    if (std::min(end, client.in.size()) > service_.longest_request) {
      client.asked = true;
      return refuse(client, cat("a request has at most ", service_.longest_request, " bytes"));
    }
    if (end == std::string::npos) return;
    client.in.resize(end);
    client.asked = true;
    answer(client);
  } catch (const IoError&) {
    client.connection.reset();
  }
}

void LineServer::answer(Client& client) {
  try {
    const Answer answer = service_.answer(client.id, client.in);
    for (const std::string& line : answer.lines) send(client, line, false);
    client.done = answer.last;
  } catch (const std::exception& error) {
    refuse(client, error.what());
  }
}

void LineServer::send(Client& client, std::string_view line, bool last) {
  client.out += cat(line, '\n');
  client.done = client.done || last;
  flush(client);
}

void LineServer::flush(Client& client) {
  if (!client.connection || client.out.empty()) return;
  try {
    client.out.erase(0, send_some(client.connection.get(), client.out));
    if (client.out.size() > service_.most_unread) client.connection.reset();
  } catch (const IoError&) {
    client.connection.reset();
  }
}

void LineServer::tell(int64_t id, std::string_view line, bool last) {
  const std::scoped_lock lock(mutex_);
  const auto client = std::ranges::find(clients_, id, &Client::id);
  if (client != clients_.end()) send(*client, line, last);
}

}  // namespace tesserae::os
