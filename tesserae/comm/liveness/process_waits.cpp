#include "tesserae/comm/liveness/process_waits.h"

#include <atomic>

namespace tesserae::comm {
namespace {

std::atomic<int> waiting = 0;
std::atomic<bool> unseen = false;

}  // namespace

void WaitsForOthers::set(bool waits) {
  if (waits == waits_) return;
  waits_ = waits;
  waiting += waits ? 1 : -1;
}

bool process_waits() {
  return unseen || waiting > 0;
}

void waits_unseen() {
  unseen = true;
}

}  // namespace tesserae::comm
