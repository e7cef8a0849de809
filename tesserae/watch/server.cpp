#include "tesserae/watch/server.h"

#include "tesserae/os/host.h"
#include "tesserae/watch/access.h"
#include "tesserae/watch/http_loop.h"
#include "tesserae/watch/routes.h"

namespace tesserae::watch {
namespace {

/// Others of this host may look, as they may look at files that are open to all; but dial.sock is its user's alone, and
/// a page that turns the dial must not open it to more.
std::string token_of(const ServerOptions& options, const os::TcpListener& listener) {
  const bool others = !listener.loopback() || options.allow_control;
  return options.token.empty() && others ? random_token() : options.token;
}

/// What every answer carries. Nothing is kept by anybody: the next answer differs.
void protect(HttpResponse& response) {
  const auto has = [&response](std::string_view name) {
    return std::ranges::any_of(response.headers, [name](const auto& header) { return header.first == name; });
  };
  response.headers.emplace_back("Cache-Control", "no-store");
  response.headers.emplace_back("X-Content-Type-Options", "nosniff");
  response.headers.emplace_back("Referrer-Policy", "no-referrer");
  response.headers.emplace_back("Cross-Origin-Resource-Policy", "same-origin");
  if (!has("Content-Security-Policy")) {
    response.headers.emplace_back("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'");
  }
}

}  // namespace

struct Server::State {
  State(const os::Path& folder, const ServerOptions& options, os::TcpListener listener)
      : run(folder, options.begins),
        routes(run, options.allow_control),
        access(listener, token_of(options, listener)),
        loop(std::move(listener), [this](const HttpRequest& request) { return answer(request); },
             {.arrival = options.patience}) {}

  HttpResponse answer(const HttpRequest& request) const {
    HttpResponse response = [&] {
      if (auto refused = access.refused(request)) return *refused;
      if (Routes::changes(request)) {
        if (auto refused = access.refused_change(request)) return *refused;
      }
      HttpResponse served = routes.answer(request);
      if (std::string cookie = access.cookie_for(request); !cookie.empty()) {
        served.headers.emplace_back("Set-Cookie", std::move(cookie));
      }
      return served;
    }();
    protect(response);
    return response;
  }

  RunFolder run;
  Routes routes;
  Access access;
  HttpLoop loop;  // the last member: its threads use all others
};

Server::Server(const os::Path& folder, const ServerOptions& options) {
  RunFolder check(folder, options.begins);  // before a port is taken for nothing
  state_ = std::make_unique<State>(folder, options, os::TcpListener(options.host, options.port));
}

Server::~Server() = default;

uint16_t Server::port() const {
  return state_->loop.listener().port();
}

std::string Server::url() const {
  const os::TcpListener& listener = state_->loop.listener();
  std::string host = listener.address();
  if (host == "0.0.0.0" || host == "::") host = os::host_name();  // all addresses: a name that others can use
  if (host.find(':') != std::string::npos) host = "[" + host + "]";
  const std::string& token = state_->access.token();
  return cat("http://", host, ":", listener.port(), "/", token.empty() ? "" : "?token=" + token);
}

}  // namespace tesserae::watch
