#include "cli/ask.h"

#include "tesserae/base/error.h"
#include "tesserae/dial/client.h"
#include "tesserae/monitor/requests.h"
#include "tesserae/os/seconds.h"

namespace tesserae::cli {

dial::Json ask_monitor(const std::string& folder, const dial::Json& request, double seconds) {
  dial::Client client(folder, request, monitor::socket_name);
  const os::Deadline deadline(os::milliseconds(seconds));
  while (true) {
    const auto event = client.next(deadline);
    if (!event) {
      throw IoError("ask", cat("the run in ", folder, " has not answered within ", seconds,
                               " s (--wait waits longer); `tesserae stacks` tells where its ranks are"));
    }
    if (event->at("event") == "accepted") continue;
    if (event->at("event") == "error") throw InvalidArgument("ask", event->value("message", "the run refused"));
    return *event;
  }
}

}  // namespace tesserae::cli
