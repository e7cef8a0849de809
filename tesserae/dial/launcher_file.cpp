#include "tesserae/dial/launcher_file.h"

#include <cstdlib>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/comm/membership.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/os/host.h"
#include "tesserae/os/process.h"

namespace tesserae::dial {
namespace {

constexpr const char* file_name = "launcher.json";

}  // namespace

void note_launcher(const os::Path& folder) {
  if (std::getenv(comm::epoch_variable) == nullptr) return;
  try {
    note_launcher(folder, os::parent_id());
  } catch (const IoError& error) {
    log(LogLevel::warning,
        cat(error.what(), "; who asks this run something while ranks meet again hears that it ended"));
  }
}

void note_launcher(const os::Path& folder, pid_t launcher) {
  const Json note = {{"host", os::host_identity()},
                     {"process", static_cast<int64_t>(launcher)},
                     {"started", os::start_time(launcher).value_or(0)}};
  // As a whole, or not at all: somebody may be reading.
  const os::Path draft = folder / cat(file_name, ".", os::process_id());
  os::files().write(draft, note.dump() + "\n");
  os::files().rename(draft, folder / file_name);
}

bool launcher_lives(const os::Path& folder) {
  if (!os::files().exists(folder / file_name)) return false;
  const Json note = Json::parse(os::files().read(folder / file_name), nullptr, /*allow_exceptions=*/false);
  if (!note.is_object()) return false;
  try {
    const auto started = os::start_time(static_cast<pid_t>(note.value("process", int64_t{0})));
    return note.value("host", std::string()) == os::host_identity() && started &&
           *started == note.value("started", uint64_t{0});
  } catch (const Json::exception&) {
    return false;  // another version's, or no file of ours
  }
}

}  // namespace tesserae::dial
