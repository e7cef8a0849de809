#include "tesserae/watch/access.h"

#include <algorithm>
#include <random>
#include <string_view>

#include "tesserae/base/checksum.h"

namespace tesserae::watch {
namespace {

/// In the same time wherever they differ: how long an answer takes tells nothing about the token.
bool same(std::string_view a, std::string_view b) {
  unsigned difference = a.size() != b.size();
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(i < b.size() ? b[i] : 0);
  }
  return difference == 0;
}

std::string cookie_value(std::string_view cookies, std::string_view name) {
  while (!cookies.empty()) {
    std::string_view pair = cookies.substr(0, cookies.find(';'));
    cookies.remove_prefix(std::min(cookies.size(), pair.size() + 1));
    while (pair.starts_with(' ')) pair.remove_prefix(1);
    if (pair.starts_with(name) && pair.substr(name.size()).starts_with('=')) {
      return std::string(pair.substr(name.size() + 1));
    }
  }
  return {};
}

/// Without its port, which a tunnel may have changed.
std::string_view host_of(std::string_view header) {
  if (header.starts_with('[')) return header.substr(0, header.find(']') + 1);
  return header.substr(0, header.find(':'));
}

bool fits_an_address(std::string_view token) {
  return std::ranges::all_of(token, [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           std::string_view("-._~").find(c) != std::string_view::npos;
  });
}

}  // namespace

Access::Access(const os::TcpListener& listener, std::string token)
    : loopback_(listener.loopback()),
      address_(listener.address()),
      cookie_name_(cat("tesserae_watch_", listener.port())),
      token_(std::move(token)) {
  if (!fits_an_address(token_)) {
    throw InvalidArgument("watch", "the token may have letters, digits and -._~ only: it is part of an address");
  }
}

bool Access::names_this_host(std::string_view header) const {
  const std::string_view host = host_of(header);
  return host == "localhost" || host == "[::1]" || host == "127.0.0.1" || host == address_;
}

bool Access::knows_token(const HttpRequest& request) const {
  return same(token_, request.parameter("token")) || same(token_, cookie_value(request.header("cookie"), cookie_name_));
}

std::optional<HttpResponse> Access::refused(const HttpRequest& request) const {
  if (loopback_ && !names_this_host(request.header("host"))) {
    return refusal(421,
                   "this page is served as localhost, 127.0.0.1 and the address that was printed only: ask for it "
                   "under one of these names");
  }
  if (!token_.empty() && !knows_token(request)) {
    return refusal(401, "this page needs its token: open the whole address that the run or `tesserae watch` printed");
  }
  return std::nullopt;
}

std::optional<HttpResponse> Access::refused_change(const HttpRequest& request) const {
  if (!request.header("content-type").starts_with("application/json")) {
    return refusal(415, "a request that changes something is JSON: Content-Type: application/json");
  }
  const std::string origin = request.header("origin");
  if (!origin.empty() && origin != "http://" + request.header("host") &&
      origin != "https://" + request.header("host")) {
    return refusal(403, "a page of another site may not change anything here");
  }
  return std::nullopt;
}

std::string Access::cookie_for(const HttpRequest& request) const {
  if (token_.empty() || !same(token_, request.parameter("token"))) return {};
  return cat(cookie_name_, "=", token_, "; Path=/; HttpOnly; SameSite=Strict");
}

std::string random_token() {
  std::random_device random;
  const auto word = [&random] { return (static_cast<uint64_t>(random()) << 32) | random(); };
  return to_hex(word()) + to_hex(word());
}

}  // namespace tesserae::watch
