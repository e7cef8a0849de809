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
//  6. If the first host is lost there is nobody to decide: the ranks of the others end by 4. Unless all hosts see one
//     folder: then one of the others takes over, as succession.cpp says, and who decides claims before 3. Instead of 4,
//     ranks of a host that is cut off live until it knows of a claim; without a launcher that decides they get nowhere.
//  7. A first launcher that was told that the job survives no loss takes no part: the store is its rank 0's, which has
//     none of the keys that it would make. The ranks find out and end (train/same_config.h); nobody is killed here.
//
// So at most one side goes on, that of the host that decides; and what the ranks of another one may still do until 4 is
// nothing that counts, since rank 0, which alone writes what a run says and commits checkpoints, is with the one that
// decides, as long as that has a rank.

#include "tesserae/comm/host_links.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <sstream>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
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
std::string come_over_key(int host) {
  return cat("come-over/", host);
}
constexpr const char *job_over = "over", *gone_hosts = "gone";
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

std::string text_of(const std::vector<RankProcess>& processes) {
  std::string text = " ";
  for (const RankProcess& each : processes) {
    text += cat(each.number, " ", each.rank, " ", each.local_rank, " ", each.name, " ");
  }
  return text;
}

std::vector<int> numbers(const std::string& text) {
  std::vector<int> found;
  std::istringstream words(text);
  for (int number = 0; words >> number;) found.push_back(number);
  return found;
}

}  // namespace

OtherHosts::OtherHosts(c10::intrusive_ptr<c10d::Store> store, int hosts, milliseconds patience,
                       std::optional<Succession> succession, Claim own, const std::vector<int>& gone)
    : store_(c10::make_intrusive<c10d::PrefixStore>(hosts_prefix, std::move(store))),
      patience_(patience + to_be_gone),
      hosts_(static_cast<size_t>(hosts)),
      succession_(std::move(succession)),
      own_(std::move(own)) {
  for (const int host : gone) hosts_[static_cast<size_t>(host)].given_up = true;
  tell_who_is_gone();
  for (int host = 0; host < hosts; ++host) {
    store_->set(exits_of(host), " ");
    hosts_[static_cast<size_t>(host)].changed = Clock::now() + std::max(to_come - patience_, milliseconds(0));
  }
}

void OtherHosts::look() {
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + look_every;
  for (size_t number = 0; number < hosts_.size(); ++number) {
    Host& host = hosts_[number];
    if (static_cast<int>(number) == own_.host || host.given_up || host.left) continue;
    std::istringstream exits(store_->get_to_str(exits_of(static_cast<int>(number))));
    os::Exit exit;
    for (int process = 0; exits >> process >> exit.code >> exit.signal;) {
      if (process == host_left) {
        host.left = true;
        tell_who_is_gone();
      } else if (process == host_closes)
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
  store_->set(given_up_key(host), "1");
  tell_who_is_gone();
}

/// Whether the next claim is this one's. Where storage is not reached it is asked again.
bool OtherHosts::claim(Claim next) {
  if (deposed_by_) return false;
  ++next.generation;
  try {
    if (succession_->claim(next)) {
      own_ = std::move(next);
      failed_ = false;
      return true;
    }
    const std::optional<Claim> newest = succession_->newest();
    if (newest && newest->host == own_.host && !newest->status) {
      own_ = *newest;  // that of a try whose answer was lost
      for (const int host : own_.without) mark_given_up(host);
      return false;
    }
    deposed_by_ = newest ? newest->host : own_.host;
    failed_ = false;
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
  store_->set(gone_hosts, gone);
}

std::optional<std::vector<RankProcess>> OtherHosts::come_over(int host) {
  const std::string key = come_over_key(host);
  if (!store_->check({key})) return std::nullopt;
  std::vector<RankProcess> processes;
  std::istringstream words(store_->get_to_str(key));
  for (RankProcess each; words >> each.number >> each.rank >> each.local_rank >> each.name;) processes.push_back(each);
  return processes;
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
  const auto all_have_heard = [this] {
    for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
      if (host != own_.host && !is_gone(host)) return false;
    }
    return true;
  };
  while (!all_have_heard() && !deadline.passed() && !deposed_by_) {
    os::sleep_for(look_every);
    look();
  }
  if (!succession_ || deposed_by_) return;
  Claim over = own_;  // for those that may still look for one
  over.status = status;
  bool claimed = false;
  for (const os::Deadline to_claim(to_hear); !claimed && !deposed_by_ && !to_claim.passed();) {
    over.generation = own_.generation;
    claimed = claim(over);
    if (!claimed) os::sleep_for(look_every);
  }
  if (claimed && all_have_heard()) succession_->clear();
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
  bool abandoned = false;
  std::atomic<bool> wants_known = false;
  bool met = false;  // the first launcher has made room for what this one says
  std::string broken;
  std::optional<int> status;
  Known known;
  Clock::time_point answered = Clock::now();  // when the last request was sent that was answered

  bool is_alone() const { return !broken.empty() && !met; }  // with the mutex

  bool is_abandoned() {
    std::lock_guard lock(mutex);
    return abandoned;
  }

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
      if (is_abandoned()) return false;
      if (!saying.empty() && !store->check({exits_of(host)})) {  // nobody there yet to hear it
        std::lock_guard lock(mutex);
        to_say.insert(0, std::exchange(saying, ""));
      }
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
      Known now;
      if (is_met && wants_known) {
        const Mandate mandate = mandate_of(of_job).value_or(Mandate());
        now.job = mandate.job;
        now.host = mandate.host;
        now.gone = numbers(store->get_to_str(gone_hosts));
        now.remembered = all_remembered(of_job);
      }
      std::lock_guard lock(mutex);
      if (!now.job.empty()) known = std::move(now);
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

FirstHost::FirstHost(const std::string& address, uint16_t port, int host, milliseconds patience, milliseconds to_come,
                     const std::optional<std::vector<RankProcess>>& processes)
    : heard_(std::make_shared<Heard>()), patience_(patience) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = to_come;
  heard_->host = host;
  try {
    heard_->of_job = c10::make_intrusive<c10d::TCPStore>(address, options);
    heard_->of_job->setTimeout(milliseconds(120'000));
    heard_->store = c10::make_intrusive<c10d::PrefixStore>(hosts_prefix, heard_->of_job);
  } catch (const std::exception& failure) {
    throw IoError("FirstHost", cat("the launcher of the host that decides, at ", address, ":", port,
                                   ", is not reached: ", reason_of(failure)));
  }
  heard_->answered = Heard::Clock::now();
  try {
    if (processes) {
      heard_->store->set(come_over_key(host), text_of(*processes));
      heard_->met = true;
    }
    heard_->store->add(beats_of(host), 1);  // from now on it is missed
    if (heard_->store->add(launchers_of(host), 1) == 1) return;
  } catch (const std::exception& failure) {
    throw IoError("FirstHost", cat("the launcher of the host that decides is gone: ", reason_of(failure)));
  }
  throw IoError("FirstHost",
                cat("host ", host, " has been in this job before, and the job goes on without it: wait for ",
                    "its end, or end it, and start all hosts again"));
}

FirstHost::~FirstHost() {
  {
    std::lock_guard lock(heard_->mutex);
    if (heard_->abandoned) return;
  }
  report(host_left, {});
  limiter_.call([heard = heard_] { return heard->exchange(); }, std::chrono::seconds(1));
}

void FirstHost::abandon() {
  std::lock_guard lock(heard_->mutex);
  heard_->abandoned = true;
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
    const bool knows = heard_->met && (!heard_->wants_known || !heard_->known.job.empty());
    const bool soon = heard_->to_say.empty() && heard_->places.empty() &&
                      Heard::Clock::now() - heard_->answered < (knows ? beat_every : look_every);
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

bool FirstHost::given_up() const {
  std::lock_guard lock(heard_->mutex);
  return heard_->given_up;
}

bool FirstHost::may_be_succeeded() const {
  std::lock_guard lock(heard_->mutex);
  return Heard::Clock::now() - heard_->answered >= patience_ + to_be_succeeded;
}

bool FirstHost::is_broken() const {
  std::lock_guard lock(heard_->mutex);
  return !heard_->broken.empty();
}

FirstHost::Known FirstHost::known() const {
  heard_->wants_known = true;
  std::lock_guard lock(heard_->mutex);
  return heard_->known;
}

std::string FirstHost::cut_off() const {
  std::lock_guard lock(heard_->mutex);
  if (heard_->status || heard_->is_alone()) return "";
  if (heard_->given_up) return "the job goes on without this host, of which nothing was heard for too long";
  if (!heard_->broken.empty()) return cat("the launcher of the host that decides is gone: ", heard_->broken);
  if (Heard::Clock::now() - heard_->answered < patience_) return "";
  return cat(
      "nothing was heard of the job's first host for ", patience_.count(),
      " ms (run.deadline_seconds, or --host-deadline of `tesserae run`): the job may go on there without this one");
}

bool is_reached(const std::string& address, uint16_t port, milliseconds limit) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = limit;
  TimeLimiter limiter;
  try {
    return limiter
        .call([address, options] { return c10::make_intrusive<c10d::TCPStore>(address, options) != nullptr; }, limit)
        .value_or(false);
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace tesserae::comm
