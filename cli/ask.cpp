#include "cli/ask.h"

#include "tesserae/base/error.h"
#include "tesserae/dial/client.h"
#include "tesserae/monitor/requests.h"
#include "tesserae/os/seconds.h"

namespace tesserae::cli {
namespace {

dial::Json ask(const std::string& folder, const dial::Json& request, double seconds, const char* socket,
               const char* otherwise) {
  const os::Deadline deadline(os::milliseconds(seconds));
  dial::Client client(folder, request, deadline, socket);
  while (true) {
    const auto event = client.next(deadline);
    if (!event) {
      throw IoError("ask", cat("the run in ", folder, " has not answered within ", seconds,
                               " s (--wait waits longer); ", otherwise));
    }
    if (event->at("event") == "accepted") continue;
    if (event->at("event") == "error") throw InvalidArgument("ask", message_of(*event));
    return *event;
  }
}

}  // namespace

dial::Json ask_monitor(const std::string& folder, const dial::Json& request, double seconds) {
  return ask(folder, request, seconds, monitor::socket_name, "`tesserae stacks` tells where its ranks are");
}

dial::Json ask_dial(const std::string& folder, const dial::Json& request, double seconds) {
  return ask(folder, request, seconds, dial::socket_name, "what it was asked for may still be done");
}

std::string message_of(const dial::Json& event) {
  const std::string text = event.value("message", "the run refused without a reason");
  const size_t end = text.find("] ");
  return text.front() == '[' && end != std::string::npos ? text.substr(end + 2) : text;
}

}  // namespace tesserae::cli
