#include "tesserae/comm/liveness/asked_store.h"

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::comm {

bool AskedStore::may_ask() {
  if (state_ == State::answers) return true;
  // One that stalled answers in the end what it was asked: from then on it is asked again.
  if (state_ == State::gone || limiter_.busy()) return false;
  log(LogLevel::info, "the store of the job answers again");
  state_ = State::answers;
  return true;
}

void AskedStore::stall() {
  state_ = State::stalls;
  log(LogLevel::info, "the store of the job cannot be asked for now: no answer");
}

void AskedStore::fail(const std::string& why) {
  state_ = State::gone;
  log(LogLevel::info, cat("the store of the job cannot be asked any more: ", why));
  gone_();
}

}  // namespace tesserae::comm
