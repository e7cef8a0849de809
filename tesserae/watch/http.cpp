#include "tesserae/watch/http.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

namespace tesserae::watch {
namespace {

const char* reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 409:
      return "Conflict";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 421:
      return "Misdirected Request";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Internal Server Error";
  }
}

bool is_token(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("!#$%&'*+-.^_`|~").find(static_cast<char>(c)) != std::string::npos;
  });
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

std::string lower(std::string_view text) {
  std::string made(text);
  std::ranges::transform(made, made.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return made;
}

std::string decoded(std::string_view text, bool plus_is_space) {
  std::string made;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+' && plus_is_space) {
      made += ' ';
    } else if (text[i] != '%') {
      made += text[i];
    } else {
      unsigned value = 0;
      const char* end = text.data() + std::min(text.size(), i + 3);
      const auto read = std::from_chars(text.data() + i + 1, end, value, 16);
      if (read.ptr != text.data() + i + 3) throw BadRequest(400, "a percent sign of the address has no two digits");
      made += static_cast<char>(value);
      i += 2;
    }
  }
  return made;
}

void read_target(std::string_view target, HttpRequest& request) {
  if (!target.starts_with('/')) throw BadRequest(400, "the address of a request begins with /");
  const size_t question = target.find('?');
  request.path = decoded(target.substr(0, question), false);
  std::string_view rest = question == std::string_view::npos ? "" : target.substr(question + 1);
  while (!rest.empty()) {
    const std::string_view pair = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), pair.size() + 1));
    const size_t equals = pair.find('=');
    const std::string_view value = equals == std::string_view::npos ? "" : pair.substr(equals + 1);
    if (!pair.empty()) request.query.emplace(decoded(pair.substr(0, equals), true), decoded(value, true));
  }
}

void read_request_line(std::string_view line, HttpRequest& request) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) throw BadRequest(400, "this is no request of HTTP");
  const std::string_view version = line.substr(last + 1);
  if (version != "HTTP/1.1" && version != "HTTP/1.0")
    throw BadRequest(505, "only HTTP/1.1 and HTTP/1.0 are spoken here");
  request.method = line.substr(0, first);
  if (!is_token(request.method)) throw BadRequest(400, "this is no request of HTTP");
  request.keep_alive = version == "HTTP/1.1";
  read_target(line.substr(first + 1, last - first - 1), request);
}

void read_header(std::string_view line, HttpRequest& request) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) {
    throw BadRequest(400, "a header has no name");
  }
  const std::string_view value = trimmed(line.substr(colon + 1));
  if (std::ranges::any_of(value, [](unsigned char c) { return (c < 32 && c != '\t') || c == 127; })) {
    throw BadRequest(400, "a header holds control characters");
  }
  const std::string name = lower(line.substr(0, colon));
  const auto [entry, added] = request.headers.emplace(name, value);
  if (added) return;
  if (name == "host" || name == "content-length" || name == "cookie") {
    throw BadRequest(400, "header " + name + " comes twice");
  }
  entry->second += cat(", ", value);
}

size_t body_length(const HttpRequest& request) {
  if (request.headers.contains("transfer-encoding")) throw BadRequest(501, "a request in chunks is not taken");
  const auto header = request.headers.find("content-length");
  if (header == request.headers.end()) return 0;
  size_t length = 0;
  const std::string& text = header->second;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), length);
  if (text.empty() || read.ptr != text.data() + text.size() || read.ec == std::errc::invalid_argument) {
    throw BadRequest(400, "the length of a request is no number");
  }
  if (read.ec != std::errc() || length > most_body_bytes) {
    throw BadRequest(413, cat("a request has at most ", most_body_bytes, " bytes"));
  }
  return length;
}

}  // namespace

std::string HttpRequest::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

std::string HttpRequest::parameter(const std::string& name) const {
  const auto found = query.find(name);
  return found == query.end() ? "" : found->second;
}

std::optional<HttpRequest> take_request(std::string& bytes) {
  bytes.erase(0, std::min(bytes.find_first_not_of("\r\n"), bytes.size()));  // empty lines between requests
  const size_t end = bytes.find("\r\n\r\n");
  if (std::min(end, bytes.size()) > most_head_bytes) {
    throw BadRequest(431, cat("the headers of a request have at most ", most_head_bytes, " bytes"));
  }
  if (end == std::string::npos) return std::nullopt;
  HttpRequest request;
  std::string_view head = std::string_view(bytes).substr(0, end);
  for (bool first = true; first || !head.empty(); first = false) {
    const std::string_view line = head.substr(0, head.find("\r\n"));
    head.remove_prefix(std::min(head.size(), line.size() + 2));
    first ? read_request_line(line, request) : read_header(line, request);
  }
  const size_t length = body_length(request);
  if (bytes.size() < end + 4 + length) return std::nullopt;
  request.body = bytes.substr(end + 4, length);
  bytes.erase(0, end + 4 + length);
  const std::string connection = lower(request.header("connection"));
  if (connection.find("close") != std::string::npos) request.keep_alive = false;
  return request;
}

std::string to_bytes(const HttpResponse& response, bool keep_alive, bool head) {
  std::string out = cat("HTTP/1.1 ", response.status, " ", reason(response.status), "\r\n");
  if (response.status != 304) {
    out += cat("Content-Type: ", response.type, "\r\nContent-Length: ", response.body.size(), "\r\n");
  }
  for (const auto& [name, value] : response.headers) out += cat(name, ": ", value, "\r\n");
  out += cat("Connection: ", keep_alive ? "keep-alive" : "close", "\r\n\r\n");
  if (!head && response.status != 304) out += response.body;
  return out;
}

HttpResponse refusal(int status, const std::string& message) {
  const nlohmann::ordered_json body = {{"error", message}};
  return {.status = status, .body = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"};
}

}  // namespace tesserae::watch
