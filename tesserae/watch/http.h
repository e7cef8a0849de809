#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::watch {

// The part of HTTP/1.1 that a browser, curl and Prometheus speak to a server that takes only small requests: values and
// text, no sockets.

inline constexpr size_t most_head_bytes = 16 << 10;  ///< of a request line and its headers
inline constexpr size_t most_body_bytes = 4 << 10;   ///< of a request

struct HttpRequest {
  std::string method;                          ///< "GET"
  std::string path;                            ///< without the query, percent signs decoded
  std::map<std::string, std::string> query;    ///< decoded; of a name that comes twice the first
  std::map<std::string, std::string> headers;  ///< names in lower case
  std::string body;
  bool keep_alive = true;  ///< the connection is to be used again

  /// Empty where there is none.
  std::string header(const std::string& name) const;
  std::string parameter(const std::string& name) const;
};

struct HttpResponse {
  int status = 200;
  std::string type = "application/json";
  std::string body = {};
  std::vector<std::pair<std::string, std::string>> headers = {};
};

/// What cannot be answered but with a status: 400, 413, 431, 501, 505. The connection is of no use afterwards.
class BadRequest : public InvalidArgument {
 public:
  BadRequest(int status, const std::string& message) : InvalidArgument("http", message), status_(status) {}
  int status() const { return status_; }

 private:
  int status_;
};

/// Takes the first request off `bytes`; nothing: the rest of it is still to come. Strict: what two readers could
/// understand in two ways (two lengths, two hosts, a folded header, chunks) is refused. Throws BadRequest.
std::optional<HttpRequest> take_request(std::string& bytes);

/// As it is sent. `head`: the answer to HEAD, without its body.
std::string to_bytes(const HttpResponse& response, bool keep_alive, bool head = false);

/// {"error": message} with that status.
HttpResponse refusal(int status, const std::string& message);

}  // namespace tesserae::watch
