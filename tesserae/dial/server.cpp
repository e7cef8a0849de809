#include "tesserae/dial/server.h"

#include <algorithm>
#include <utility>

#include "tesserae/base/log.h"

namespace tesserae::dial {
namespace {

constexpr size_t most_clients = 16;
constexpr size_t most_unread = 64 << 10;
constexpr std::chrono::seconds arrival_deadline(10);
constexpr std::chrono::milliseconds tick(500);  // for deadlines, and for clients that read slowly

}  // namespace

Server::Server(const os::Path& folder, int ranks)
    : ranks_(ranks), listener_(folder / socket_name), stop_(os::make_pipe()), thread_([this] { run(); }) {}

Server::~Server() {
  stop_.write.reset();
  thread_.join();
  for (Client& client : clients_) {
    if (client.asked && !client.done) send(client, error_event("the run has ended"));
    flush(client);
  }
}

void Server::run() {
  while (true) {
    std::vector<int> waiting = {stop_.read.get()};
    if (listens()) waiting.push_back(listener_.descriptor());
    const bool alone = [&] {
      const std::scoped_lock lock(mutex_);
      for (const Client& client : clients_) waiting.push_back(client.connection.get());
      return clients_.empty() && listens();
    }();
    try {
      const std::chrono::nanoseconds patience = alone ? std::chrono::nanoseconds(std::chrono::hours(1)) : tick;
      const std::vector<int> ready = os::wait_readable(waiting, os::Deadline(patience));
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
      log(LogLevel::error, cat("the dial takes no more requests: ", error.what()));
      return;
    }
  }
}

void Server::accept() {
  const auto next = [this]() -> os::Descriptor {
    try {
      os::Descriptor connection = listener_.accept();
      if (connection) refused_.reset();
      return connection;
    } catch (const IoError& error) {
      // This process has no descriptor left, say. It may have some again, and whoever asks waits at the socket.
      if (!refused_) log(LogLevel::warning, cat("the dial takes no requests for now: ", error.what()));
      refused_.emplace(tick);
      return {};
    }
  };
  while (os::Descriptor connection = next()) {
    clients_.push_back({.id = next_id_++,
                        .connection = std::move(connection),
                        .arrival = os::Deadline(arrival_deadline),
                        .in = {},
                        .out = {}});
    if (clients_.size() <= most_clients) continue;
    send(clients_.back(), error_event(cat(most_clients, " others are being served; try again")));
    clients_.pop_back();
  }
}

void Server::read(Client& client) {
  try {
    const std::string bytes = os::read_some(client.connection.get(), longest_line + 1);
    if (bytes.empty()) return client.connection.reset();  // it hung up
    if (client.asked) return;                             // one request a connection
    client.in += bytes;
    const size_t end = client.in.find('\n');
    if (std::min(end, client.in.size()) > longest_line) {
      client.asked = true;
      return send(client, error_event(cat("a request has at most ", longest_line, " bytes")));
    }
    if (end == std::string::npos) return;
    client.in.resize(end);
    client.asked = true;
    answer(client);
  } catch (const IoError&) {
    client.connection.reset();
  }
}

void Server::answer(Client& client) {
  try {
    const Request request = parse_request(client.in, ranks_);
    if (request.kind == Request::Kind::show) return send(client, status_);
    if (request.kind == Request::Kind::turn) {
      send(client, {{"event", "accepted"}, {"degrees", to_json(request.degrees)}});
    }
    asked_.push_back({.client = client.id, .request = request});
  } catch (const InvalidArgument& error) {
    send(client, error_event(error.what()));
  }
}

void Server::send(Client& client, const Json& event) {
  client.out += event.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  client.done = client.done || is_last(event);
  flush(client);
}

void Server::flush(Client& client) {
  if (!client.connection || client.out.empty()) return;
  try {
    client.out.erase(0, os::send_some(client.connection.get(), client.out));
    if (client.out.size() > most_unread) client.connection.reset();
  } catch (const IoError&) {
    client.connection.reset();
  }
}

std::vector<Server::Asked> Server::take() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(asked_, {});
}

void Server::tell(int64_t id, const Json& event) {
  const std::scoped_lock lock(mutex_);
  const auto client = std::ranges::find(clients_, id, &Client::id);
  if (client != clients_.end()) send(*client, event);
}

void Server::set_status(const Json& status) {
  const std::scoped_lock lock(mutex_);
  status_ = status;
}

}  // namespace tesserae::dial
