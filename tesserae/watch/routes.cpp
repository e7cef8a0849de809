#include "tesserae/watch/routes.h"

#include <algorithm>
#include <charconv>

#include "tesserae/base/checksum.h"
#include "tesserae/dial/client.h"
#include "tesserae/watch/access.h"
#include "tesserae/watch/page.h"
#include "tesserae/watch/prometheus.h"

namespace tesserae::watch {
namespace {

constexpr size_t most_timeline_ranks = 64;
constexpr std::chrono::seconds run_patience(2);  // the run's thread that answers does nothing else

std::string dumped(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// A whole number of the query; `missing` where it is not given.
uint64_t number(const HttpRequest& request, const char* name, uint64_t missing) {
  const std::string text = request.parameter(name);
  if (text.empty()) return missing;
  uint64_t value = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  if (read.ec != std::errc() || read.ptr != text.data() + text.size()) {
    throw BadRequest(400, cat(name, " must be a whole number, but is '", text, "'"));
  }
  return value;
}

/// What the page asks the run for, in the dial's own words.
Json turn_of(const std::string& body) {
  const Json asked = Json::parse(body, nullptr, false);
  if (asked.is_object() && asked.value("auto", Json()) == true) return {{"ask", "auto"}};
  Json turn = {{"ask", "turn"}};
  for (const char* what : {"degree", "degrees", "offload"}) {
    if (asked.is_object() && asked.contains(what)) turn[what] = asked[what];
  }
  if (turn.size() > 1) return turn;
  throw BadRequest(
      400, R"(give {"degree": 4}, {"degrees": [1, 2, 4]}, {"offload": {"optimizer": "disk"}} or {"auto": true})");
}

}  // namespace

HttpResponse Routes::answer(const HttpRequest& request) const try {
  const bool get = !changes(request);
  const std::string& path = request.path;
  if (path == "/api/dial" && (get || request.method == "POST")) return dial(request);
  if (!get) return refusal(405, cat(request.method, " is not taken here"));
  if (path == "/") return page(request);
  if (path == "/api/run") return run();
  if (path == "/api/now") return now(request);
  if (path == "/api/timeline") return timeline(request);
  if (path == "/api/metrics") return lines(run_.metrics(number(request, "from", 0), request.parameter("mark")));
  if (path == "/api/events") return lines(run_.events(number(request, "from", 0), request.parameter("mark")));
  if (path == "/metrics") return metrics();
  return refusal(404, "there is no such address; the page is at /");
} catch (const BadRequest& error) {
  return refusal(error.status(), error.what());
}

HttpResponse Routes::page(const HttpRequest& request) {
  const std::string nonce = random_token();
  return {.type = "text/html; charset=utf-8",
          .body = page_with(nonce),
          .headers = {{"Content-Security-Policy", policy_with(nonce)}}};
}

HttpResponse Routes::run() const {
  Json run = run_.run();
  run["allow_control"] = allow_control_;
  return {.body = dumped(run)};
}

HttpResponse Routes::now(const HttpRequest& request) const {
  const RunFolder::Document document = run_.now();
  if (!document) return refusal(404, "the run has not told of itself yet (monitor/now.json)");
  const std::string tag = "\"" + to_hex(checksum(*document)) + "\"";
  if (request.header("if-none-match") == tag) return {.status = 304, .headers = {{"ETag", tag}}};
  return {.body = *document, .headers = {{"ETag", tag}}};
}

HttpResponse Routes::timeline(const HttpRequest& request) const {
  const uint64_t count = std::min<uint64_t>(number(request, "count", most_timeline_ranks), most_timeline_ranks);
  std::optional<std::string> text = number(request, "rank", UINT64_MAX) != UINT64_MAX
                                        ? run_.timeline(number(request, "rank", 0), 1)
                                        : run_.timeline(number(request, "from", 0), count);
  if (!text) return refusal(404, "the run has no timeline yet (monitor/timeline.json)");
  return {.body = std::move(*text)};
}

HttpResponse Routes::lines(const RunFolder::Lines& lines) {
  return {.type = "application/x-ndjson",
          .body = lines.text,
          .headers = {{"X-From", std::to_string(lines.from)},
                      {"X-Next", std::to_string(lines.next)},
                      {"X-Mark", lines.mark},
                      {"X-Size", std::to_string(lines.size)}}};
}

HttpResponse Routes::dial(const HttpRequest& request) const {
  const bool turns = changes(request);
  if (turns && !allow_control_) {
    return refusal(403, "this page only shows: start `tesserae watch` with --allow-control to turn the dial from it");
  }
  const Json asked = turns ? turn_of(request.body) : Json{{"ask", "show"}};
  try {
    dial::Client client(run_.path(), asked);  // nobody listens now: the page asks again
    const std::optional<Json> event = client.next(os::Deadline(run_patience));
    if (!event) return refusal(504, "the run does not answer; what it was asked for may still be done");
    return {.status = event->at("event") == "error" ? 409 : 200, .body = dumped(*event)};
  } catch (const InvalidArgument& error) {
    return refusal(404, error.what());
  } catch (const IoError& error) {
    return refusal(503, error.what());
  }
}

HttpResponse Routes::metrics() const {
  const RunFolder::Document document = run_.now();
  const Json now = document ? Json::parse(*document, nullptr, false) : Json();
  return {.type = "text/plain; version=0.0.4; charset=utf-8",
          .body = prometheus(now, run_.last_metrics(), run_.life())};
}

}  // namespace tesserae::watch
