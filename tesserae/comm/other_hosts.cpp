#include "tesserae/comm/other_hosts.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <sstream>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/os/clock.h"

namespace tesserae::comm {

using std::chrono::milliseconds;

namespace {

/// What a launcher needs from its last answer to the end of its ranks, beyond `patience`.
constexpr milliseconds to_be_gone(2000);
/// How long the others have to hear that the job is over.
constexpr milliseconds to_hear(5000);

}  // namespace

OtherHosts::OtherHosts(c10::intrusive_ptr<c10d::Store> store, int hosts, milliseconds patience,
                       std::optional<Succession> succession, Claim own, const std::vector<int>& gone)
    : store_(c10::make_intrusive<c10d::PrefixStore>(links::prefix, std::move(store))),
      patience_(patience + to_be_gone),
      hosts_(static_cast<size_t>(hosts)),
      succession_(std::move(succession)),
      own_(std::move(own)) {
  for (const int host : gone) hosts_[static_cast<size_t>(host)].given_up = true;
  tell_who_is_gone();
  for (int host = 0; host < hosts; ++host) {
    store_->set(links::exits_of(host), " ");
    hosts_[static_cast<size_t>(host)].changed = Clock::now() + std::max(links::to_come - patience_, milliseconds(0));
  }
}

void OtherHosts::look() {
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + links::look_every;
  for (size_t number = 0; number < hosts_.size(); ++number) {
    Host& host = hosts_[number];
    if (static_cast<int>(number) == own_.host || host.given_up || host.left) continue;
    std::istringstream exits(store_->get_to_str(links::exits_of(static_cast<int>(number))));
    os::Exit exit;
    for (int process = 0; exits >> process >> exit.code >> exit.signal;) {
      if (process == links::host_left) {
        host.left = true;
        tell_who_is_gone();
      } else if (process == links::host_closes)
        host.closes = true;
      else
        exits_[process] = exit;
    }
    const int64_t beats = store_->add(links::beats_of(static_cast<int>(number)), 0);
    const bool came_again = store_->add(links::launchers_of(static_cast<int>(number)), 0) > 1;
    if (beats != host.beats && !came_again) {
      host.beats = beats;
      host.changed = now;
    } else if ((now - host.changed >= patience_ || came_again) && !host.left) {
      give_up(static_cast<int>(number));
      if (deposed_by_) return;
    }
  }
}

void OtherHosts::give_up(int host) {
  Claim next = own_;
  next.without.push_back(host);
  if (!succession_ || claim(next)) mark_given_up(host);
}

void OtherHosts::mark_given_up(int host) {
  hosts_[static_cast<size_t>(host)].given_up = true;
  store_->set(links::given_up_key(host), "1");
  tell_who_is_gone();
}

/// Whether the next claim is this one's. Where storage is not reached it is asked again.
bool OtherHosts::claim(Claim next) {
  if (deposed_by_) return false;
  ++next.generation;
  try {
    const bool granted = succession_->claim(next);
    const std::optional<Claim> newest = granted ? std::optional(next) : succession_->newest();
    failed_ = false;
    if (granted) {
      own_ = std::move(next);
      return true;
    }
    if (newest && newest->host == own_.host && !newest->status) {
      own_ = *newest;  // that of a try whose answer was lost
      for (const int host : own_.without) mark_given_up(host);
      return false;
    }
    deposed_by_ = newest ? newest->host : own_.host;
  } catch (const IoError& error) {
    if (!std::exchange(failed_, true)) {
      log(LogLevel::warning, cat("it is not known whether this host decides still: ", error.what()));
    }
  }
  return false;
}

void OtherHosts::tell_who_is_gone() {
  std::string gone = " ";
  for (size_t host = 0; host < hosts_.size(); ++host) {
    if (is_gone(static_cast<int>(host))) gone += cat(host, " ");
  }
  store_->set(links::gone_hosts, gone);
}

std::optional<std::vector<RankProcess>> OtherHosts::come_over(int host) {
  const std::string key = links::come_over_key(host);
  return store_->check({key}) ? std::optional(links::processes_from(store_->get_to_str(key))) : std::nullopt;
}

std::optional<os::Exit> OtherHosts::exit_of(int process) const {
  const auto found = exits_.find(process);
  return found != exits_.end() ? std::optional(found->second) : std::nullopt;
}

void OtherHosts::tell(int host, const Order& order) {
  if (order.kind == Order::Kind::kill && !killed_.insert(order.process).second) return;
  store_->set(links::order_of(host, hosts_[static_cast<size_t>(host)].orders++), links::text_of(order));
}

void OtherHosts::end(int status) {
  store_->set(links::job_over, cat(status));
  const os::Deadline deadline(to_hear);
  const auto all_have_heard = [this] {
    for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
      if (host != own_.host && !is_gone(host)) return false;
    }
    return true;
  };
  while (!all_have_heard() && !deadline.passed() && !deposed_by_) {
    os::sleep_for(links::look_every);
    look();
  }
  if (!succession_ || deposed_by_) return;
  Claim over = own_;  // for those that may still look for one
  over.status = status;
  bool claimed = false;
  for (const os::Deadline to_claim(to_hear); !claimed && !deposed_by_ && !to_claim.passed();) {
    over.generation = own_.generation;
    claimed = claim(over);
    if (!claimed) os::sleep_for(links::look_every);
  }
  if (claimed && all_have_heard()) succession_->clear();
}

}  // namespace tesserae::comm
