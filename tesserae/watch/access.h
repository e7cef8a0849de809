#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tesserae/os/tcp_listener.h"
#include "tesserae/watch/http.h"

namespace tesserae::watch {

/// Who may see the page, and who may turn the dial.
///
///  - With a token: who names it, as ?token=... or in the cookie that the first such answer sets.
///  - Without: every process of this host. So the name under which the page was asked for must be one of this host, or
///    a page of somebody else's could have its own name resolved to 127.0.0.1 and read all of it (DNS rebinding).
///  - What changes something must come from the page itself: JSON, and no other Origin. A page of somebody else's can
///    send a form to 127.0.0.1, but not that.
class Access {
 public:
  /// Throws InvalidArgument for a token that an address or a cookie cannot carry as it is.
  Access(const os::TcpListener& listener, std::string token);

  /// What to answer instead; nothing: it may be served.
  std::optional<HttpResponse> refused(const HttpRequest& request) const;
  /// Of requests that change something, too.
  std::optional<HttpResponse> refused_change(const HttpRequest& request) const;
  /// "Set-Cookie" for a request that named the token in its address; empty otherwise.
  std::string cookie_for(const HttpRequest& request) const;

  const std::string& token() const { return token_; }  ///< empty: none

 private:
  bool names_this_host(std::string_view header) const;
  bool knows_token(const HttpRequest& request) const;

  bool loopback_;
  std::string address_;
  std::string cookie_name_;  // has the port: cookies do not tell ports apart
  std::string token_;
};

/// 128 bits that nobody can guess, as 32 hexadecimal digits.
std::string random_token();

}  // namespace tesserae::watch
