#include "tesserae/dial/server.h"

#include <utility>

#include "tesserae/dial/launcher_file.h"

namespace tesserae::dial {
namespace {

std::string line_of(const Json& event) {
  return event.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

Server::Server(const os::Path& folder, int ranks)
    : ranks_(ranks),
      lines_(folder / socket_name,
             {.name = "the dial",
              .answer = [this](int64_t client, const std::string& line) { return answer(client, line); },
              .refusal = [](const std::string& why) { return line_of(error_event(why)); },
              .farewell = run_ended,
              .longest_request = longest_line}) {
  note_launcher(folder);
}

os::LineServer::Answer Server::answer(int64_t client, const std::string& line) {
  const std::scoped_lock lock(mutex_);
  const Request request = parse_request(line, ranks_);
  if (request.kind == Request::Kind::show) return {.lines = {line_of(status_)}, .last = true};
  asked_.push_back({.client = client, .request = request});
  if (request.kind == Request::Kind::automatic) return {.lines = {}, .last = false};
  Json accepted = {{"event", "accepted"}};
  if (request.kind == Request::Kind::scale) accepted["ranks"] = request.ranks;
  if (request.kind == Request::Kind::experts) accepted["experts"] = request.experts;
  if (request.degrees) accepted["degrees"] = to_json(*request.degrees);
  return {.lines = {line_of(accepted)}, .last = false};
}

std::vector<Server::Asked> Server::take() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(asked_, {});
}

void Server::tell(int64_t client, const Json& event) {
  lines_.tell(client, line_of(event), is_last(event));
}

void Server::set_ranks(int ranks) {
  const std::scoped_lock lock(mutex_);
  ranks_ = ranks;
}

void Server::set_status(const Json& status) {
  const std::scoped_lock lock(mutex_);
  status_ = status;
}

}  // namespace tesserae::dial
