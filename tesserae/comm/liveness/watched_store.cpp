#include "tesserae/comm/liveness/watched_store.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tesserae/comm/error.h"
#include "tesserae/os/clock.h"

namespace tesserae::comm {

using std::chrono::milliseconds;

namespace {

// Asked again and again, not waited for with a limit: the connection is used by one request at a time, and torch warns
// of each limit that passes.
constexpr milliseconds kFirstPause{1}, kLongestPause{100};
constexpr milliseconds kAnswer{2000};

}  // namespace

WatchedStore::WatchedStore(Party party, const std::string& prefix, c10::intrusive_ptr<c10d::Store> store)
    : PrefixStore(prefix, std::move(store)), party_(std::move(party)) {}

// The process that serves it may be stopped: then no answer comes. One that is slow is asked again.
template <class Request>
auto WatchedStore::ask(Request request) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>(prefix_, store_);
  return party_.limiter->call([store, request = std::move(request)] { return request(*store); }, kAnswer);
}

void WatchedStore::give_up(milliseconds timeout) {
  const std::string text = cat(party_.name, " is not made: not all of its ", party_.members.size(),
                               " ranks asked for it within ", timeout.count(), " ms; all must, in the same order");
  if (timeout < party_.deadline) throw Timeout("Fabric::group", text, {});  // of one that may ask again
  party_.liveness->time_out("Fabric::group", text, party_.members, timeout);
}

// `request` finds nothing while what it asks for is not there.
template <class Request>
auto WatchedStore::find(const Request& request, milliseconds timeout) {
  const os::Deadline deadline(timeout);
  std::optional<Liveness::Wait> waiting;  // not for what is there
  for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    if (auto found = ask(request).value_or(std::nullopt)) return *std::move(found);
    if (!waiting) waiting.emplace(*party_.liveness);
    if (std::vector<int> gone = party_.liveness->gone_among(party_.members); !gone.empty()) {
      waiting->fail();
      throw lost_while_made(party_.name, std::move(gone));
    }
    if (deadline.passed()) {
      if (timeout >= party_.deadline) waiting->fail();
      give_up(timeout);
    }
    os::sleep_for(pause);
  }
}

void WatchedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  find([keys](c10d::Store& store) { return store.check(keys) ? std::optional(true) : std::nullopt; }, timeout);
}

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  return find([key](c10d::Store& store) { return store.check({key}) ? std::optional(store.get(key)) : std::nullopt; },
              party_.deadline);
}

std::vector<std::vector<uint8_t>> WatchedStore::multiGet(const std::vector<std::string>& keys) {
  return find(
      [keys](c10d::Store& store) { return store.check(keys) ? std::optional(store.multiGet(keys)) : std::nullopt; },
      party_.deadline);
}

c10::intrusive_ptr<c10d::Store> WatchedStore::clone() {
  return c10::make_intrusive<WatchedStore>(party_, prefix_, store_->clone());
}

bool is_watched(const c10::intrusive_ptr<c10d::Store>& store) {
  if (dynamic_cast<const WatchedStore*>(store.get()) != nullptr) return true;
  auto* const part = dynamic_cast<c10d::PrefixStore*>(store.get());
  return part != nullptr && is_watched(part->getUnderlyingStore());
}

}  // namespace tesserae::comm
