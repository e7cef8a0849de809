// How a job on several hosts goes on without one of them:
//
//  1. The launcher of the first host serves the job's store and counts epochs, as on one host (membership.cpp); the
//     others start their ranks and tell it how these end. Each of these launchers beats.
//  2. Ranks whose operations failed name those of which nothing was heard. Of such a rank on another host the first
//     launcher asks that host's to kill it, and counts it as lost once it says that it has ended. If it is replaced,
//     that host's launcher is told to start the new process.
//  3. A host whose launcher has not beaten for `patience` is given up, with all of its ranks, and for good.
//  4. A launcher that has had no answer for `patience`, counted from a beat that was answered, kills its ranks. So they
//     are gone when the others go on, whatever cut it off, since the first launcher counts from when it saw that beat,
//     and waits a little longer. One that is heard again finds that it was given up, and does the same.
//  5. A launcher that comes a second time (its host was started again) has no part in the job either, since nobody
//     knows what became of the ranks of before. It is refused, and its host given up at once.
//  6. If the first host is lost there is nobody to decide: the ranks of the others end by 4.
//  7. A first launcher that was told that the job survives no loss takes no part: the store is its rank 0's, which has
//     none of the keys that it would make. The ranks find out and end (train/same_config.h); nobody is killed here.
//
// So at most one side goes on, that of the first host; and what the ranks of another one may still do until 4 is
// nothing that counts, since rank 0, which alone writes what a run says and commits checkpoints, is with the first, as
// long as that has a rank.

#include "tesserae/comm/host_links.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/membership.h"
#include "tesserae/os/clock.h"

namespace tesserae::comm {
namespace {

using std::chrono::milliseconds;

constexpr const char* hosts_prefix = "hosts";
constexpr milliseconds look_every(50), beat_every(250);
/// What a launcher needs from its last answer to the end of its ranks, beyond `patience`.
constexpr milliseconds to_be_gone(2000);
/// How long the others have to hear that the job is over.
constexpr milliseconds to_hear(5000);
/// A host may come later than the first one: containers are fetched, queues are long.
constexpr milliseconds to_come(120'000);

std::string beats_of(int host) {
  return cat("beats/", host);
}
std::string exits_of(int host) {
  return cat("exits/", host);
}
std::string order_of(int host, int number) {
  return cat("order/", host, "/", number);
}
std::string launchers_of(int host) {
  return cat("launchers/", host);
}
std::string given_up_key(int host) {
  return cat("given-up/", host);
}
constexpr const char* job_over = "over";
constexpr int host_left = -1, host_closes = -2;  // in place of a process that ended

std::vector<uint8_t> as_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string text_of(const Order& order) {
  return cat(static_cast<int>(order.kind), " ", order.process, " ", order.rank, " ", order.local_rank, " ", order.ranks,
             " ", order.epoch);
}

Order order_from(const std::string& text) {
  std::istringstream words(text);
  int kind = 0;
  Order order;
  words >> kind >> order.process >> order.rank >> order.local_rank >> order.ranks >> order.epoch;
  order.kind = static_cast<Order::Kind>(kind);
  return order;
}

}  // namespace

OtherHosts::OtherHosts(c10::intrusive_ptr<c10d::Store> store, int hosts, milliseconds patience)
    : store_(c10::make_intrusive<c10d::PrefixStore>(hosts_prefix, std::move(store))),
      patience_(patience + to_be_gone),
      hosts_(static_cast<size_t>(hosts)) {
  for (int host = 0; host < hosts; ++host) {
    store_->set(exits_of(host), " ");
    hosts_[static_cast<size_t>(host)].changed = Clock::now() + std::max(to_come - patience_, milliseconds(0));
  }
}

void OtherHosts::look() {
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + look_every;
  for (size_t number = 1; number < hosts_.size(); ++number) {
    Host& host = hosts_[number];
    if (host.given_up || host.left) continue;
    std::istringstream exits(store_->get_to_str(exits_of(static_cast<int>(number))));
    os::Exit exit;
    for (int process = 0; exits >> process >> exit.code >> exit.signal;) {
      if (process == host_left)
        host.left = true;
      else if (process == host_closes)
        host.closes = true;
      else
        exits_[process] = exit;
    }
    const int64_t beats = store_->add(beats_of(static_cast<int>(number)), 0);
    const bool came_again = store_->add(launchers_of(static_cast<int>(number)), 0) > 1;
    if (beats != host.beats && !came_again) {
      host.beats = beats;
      host.changed = now;
    } else if ((now - host.changed >= patience_ || came_again) && !host.left) {
      host.given_up = true;
      store_->set(given_up_key(static_cast<int>(number)), "1");
    }
  }
}

std::optional<os::Exit> OtherHosts::exit_of(int process) const {
  const auto found = exits_.find(process);
  return found != exits_.end() ? std::optional(found->second) : std::nullopt;
}

void OtherHosts::tell(int host, const Order& order) {
  if (order.kind == Order::Kind::kill && !killed_.insert(order.process).second) return;
  store_->set(order_of(host, hosts_[static_cast<size_t>(host)].orders++), text_of(order));
}

void OtherHosts::end(int status) {
  store_->set(job_over, cat(status));
  const os::Deadline deadline(to_hear);
  const auto has_heard = [](const Host& host) { return host.left || host.given_up; };
  while (!std::all_of(hosts_.begin() + 1, hosts_.end(), has_heard) && !deadline.passed()) {
    os::sleep_for(look_every);
    look();
  }
}

// Requests run on another thread, which may hang in one as long as the network does.
struct FirstHost::Heard {
  using Clock = std::chrono::steady_clock;

  int host = 0;
  c10::intrusive_ptr<c10d::Store> of_job, store;
  int read = 0;  // so many orders; of that thread

  std::mutex mutex;  // guards all below
  std::string to_say;
  std::vector<Order> orders;
  std::vector<std::pair<int64_t, Order>> places;  // by spare process
  bool given_up = false;
  bool met = false;  // the first launcher has made room for what this one says
  std::string broken;
  std::optional<int> status;
  Clock::time_point answered = Clock::now();  // when the last request was sent that was answered

  bool is_alone() const { return !broken.empty() && !met; }  // with the mutex

  /// False: the store is gone.
  bool exchange() {
    const auto sent = Clock::now();
    std::string saying;
    std::vector<std::pair<int64_t, Order>> giving;
    bool is_met = false;
    {
      std::lock_guard lock(mutex);
      saying.swap(to_say);
      giving.swap(places);
      is_met = met;
    }
    try {
      is_met = is_met || store->check({exits_of(0)});  // nobody but that launcher makes it
      if (!saying.empty()) store->append(exits_of(host), as_bytes(saying));
      for (const auto& [spare, order] : giving) {
        comm::give_place(of_job, spare, order.epoch, order.rank, order.ranks);
      }
      store->add(beats_of(host), 1);
      std::vector<Order> told;
      for (; store->check({order_of(host, read)}); ++read) {
        told.push_back(order_from(store->get_to_str(order_of(host, read))));
      }
      const bool is_given_up = store->check({given_up_key(host)});
      const auto ended =
          store->check({job_over}) ? std::optional(std::stoi(store->get_to_str(job_over))) : std::nullopt;
      std::lock_guard lock(mutex);
      answered = sent;
      met = is_met;
      orders.insert(orders.end(), told.begin(), told.end());
      given_up = is_given_up;
      status = ended;
      return true;
    } catch (const std::exception& failure) {
      std::lock_guard lock(mutex);
      broken = reason_of(failure);
      return false;
    }
  }
};

FirstHost::FirstHost(const std::string& address, uint16_t port, int host, milliseconds patience)
    : heard_(std::make_shared<Heard>()), patience_(patience) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = to_come;
  heard_->host = host;
  try {
    heard_->of_job = c10::make_intrusive<c10d::TCPStore>(address, options);
    heard_->store = c10::make_intrusive<c10d::PrefixStore>(hosts_prefix, heard_->of_job);
  } catch (const std::exception& failure) {
    throw IoError("FirstHost", cat("the launcher of the job's first host, at ", address, ":", port,
                                   ", is not reached: ", reason_of(failure)));
  }
  heard_->answered = Heard::Clock::now();
  try {
    heard_->store->add(beats_of(host), 1);  // from now on it is missed
    if (heard_->store->add(launchers_of(host), 1) == 1) return;
  } catch (const std::exception& failure) {
    throw IoError("FirstHost", cat("the launcher of the job's first host is gone: ", reason_of(failure)));
  }
  throw IoError("FirstHost",
                cat("host ", host, " has been in this job before, and the job goes on without it: wait for ",
                    "its end, or end it, and start all hosts again"));
}

FirstHost::~FirstHost() {
  report(host_left, {});
  limiter_.call([heard = heard_] { return heard->exchange(); }, std::chrono::seconds(1));
}

void FirstHost::report(int process, const os::Exit& exit) {
  std::lock_guard lock(heard_->mutex);
  heard_->to_say += cat(process, " ", exit.code, " ", exit.signal, " ");
}

void FirstHost::close() {
  report(host_closes, {});
}

void FirstHost::look() {
  {
    std::lock_guard lock(heard_->mutex);
    const bool soon =
        heard_->to_say.empty() && heard_->places.empty() && Heard::Clock::now() - heard_->answered < beat_every;
    if (soon || !heard_->broken.empty()) return;
  }
  if (!limiter_.busy()) limiter_.call([heard = heard_] { return heard->exchange(); }, milliseconds(0));
}

std::vector<Order> FirstHost::orders() {
  std::lock_guard lock(heard_->mutex);
  return std::exchange(heard_->orders, {});
}

void FirstHost::give_place(int64_t spare, const Order& order) {
  std::lock_guard lock(heard_->mutex);
  heard_->places.emplace_back(spare, order);
}

std::optional<int> FirstHost::status() const {
  std::lock_guard lock(heard_->mutex);
  return heard_->status;
}

bool FirstHost::is_alone() const {
  std::lock_guard lock(heard_->mutex);
  return heard_->is_alone();
}

std::string FirstHost::cut_off() const {
  std::lock_guard lock(heard_->mutex);
  if (heard_->status || heard_->is_alone()) return "";
  if (heard_->given_up) return "the job goes on without this host, of which nothing was heard for too long";
  if (!heard_->broken.empty()) return cat("the launcher of the job's first host is gone: ", heard_->broken);
  if (Heard::Clock::now() - heard_->answered < patience_) return "";
  return cat(
      "nothing was heard of the job's first host for ", patience_.count(),
      " ms (run.deadline_seconds, or --host-deadline of `tesserae run`): the job may go on there without this one");
}

}  // namespace tesserae::comm
