#include "tesserae/comm/error.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tesserae::comm {

std::vector<int> Timeout::missing() const {
  std::vector<int> ranks = silent;
  ranks.insert(ranks.end(), absent.begin(), absent.end());
  std::ranges::sort(ranks);
  return ranks;
}

PeerLost lost_while_made(const std::string& group, std::vector<int> gone) {
  const std::string text = cat(group, " is not made: rank ", gone.front(), " ended or left the job while it was");
  return {"Fabric::group", text, std::move(gone)};
}

std::string reason_of(const std::exception& failure) {
  const auto* error = dynamic_cast<const c10::Error*>(&failure);
  return error ? error->what_without_backtrace() : failure.what();
}

}  // namespace tesserae::comm
