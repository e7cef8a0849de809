#include "tesserae/comm/liveness/verdict.h"

#include "tesserae/base/error.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/rank_list.h"

namespace tesserae::comm {

std::string Verdict::missing() const {
  if (ranks.empty()) return "";
  return cat(kind == Kind::absent ? "alive, and in no operation while others wait: " : "no sign of life from ",
             rank_list(ranks));
}

void Verdict::raise(const std::string& what) const {
  const std::string because = text.empty() ? "" : ": " + text;
  const std::string who = ranks.empty() ? "all ranks are alive, so one of them did not call it" : missing();
  switch (kind) {
    case Kind::lost:
      throw PeerLost("Group", cat(what, ": lost ", rank_list(ranks), because), ranks);
    case Kind::absent:
      throw Timeout("Group", cat(what, ": ", text, "; ", who), {}, ranks);
    case Kind::timeout:
      throw Timeout("Group", cat(what, ": ", text, "; ", who), ranks);
    case Kind::mismatch:
      throw Mismatch("Group", cat(what, ": the ranks disagree: ", text));
  }
  throw CommError("Group", what);
}

}  // namespace tesserae::comm
