#include "tesserae/comm/deciding_host.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <mutex>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/membership.h"
#include "tesserae/comm/open_store.h"

namespace tesserae::comm {

using std::chrono::milliseconds;

// Requests run on another thread, which may hang in one as long as the network does.
struct DecidingHost::Heard {
  using Clock = std::chrono::steady_clock;

  int host = 0;
  c10::intrusive_ptr<c10d::Store> of_job, store;
  int read = 0;                   // so many orders; of that thread
  int64_t times_remembered = -1;  // of what it knows; of that thread

  std::mutex mutex;  // guards all below
  std::string to_say;
  std::vector<Order> orders;
  std::vector<std::pair<int64_t, Order>> places;  // by spare process
  bool given_up = false;
  bool abandoned = false;
  bool wants_known = false;
  bool met = false;  // the first launcher has made room for what this one says
  std::string broken;
  std::optional<int> status;
  std::shared_ptr<const Known> known = std::make_shared<Known>();
  Clock::time_point answered = Clock::now();  // when the last request was sent that was answered

  bool is_alone() const { return !broken.empty() && !met; }  // with the mutex

  bool is_abandoned() {
    std::lock_guard lock(mutex);
    return abandoned;
  }

  /// What that launcher tells of the job, read anew where it has changed. Nobody but this thread replaces `known`.
  std::shared_ptr<const Known> ask_for_known() {
    const int64_t times = count_remembered(of_job);
    std::vector<int> gone = links::numbers(store->get_to_str(links::gone_hosts));
    if (times == times_remembered && gone == known->gone) return known;
    times_remembered = times;
    const Mandate mandate = mandate_of(of_job).value_or(Mandate());
    return std::make_shared<const Known>(mandate.host, mandate.job, std::move(gone), all_remembered(of_job));
  }

  /// False: the store is gone.
  bool exchange() {
    const auto sent = Clock::now();
    std::string saying;
    std::vector<std::pair<int64_t, Order>> giving;
    bool is_met = false, wants = false;
    {
      std::lock_guard lock(mutex);
      saying.swap(to_say);
      giving.swap(places);
      is_met = met;
      wants = wants_known;
    }
    try {
      is_met = is_met || store->check({links::exits_of(0)});  // nobody but that launcher makes it
      if (is_abandoned()) return false;
      if (!saying.empty() && !store->check({links::exits_of(host)})) {  // nobody there yet to hear it
        std::lock_guard lock(mutex);
        to_say.insert(0, std::exchange(saying, ""));
      }
      if (!saying.empty()) store->append(links::exits_of(host), {saying.begin(), saying.end()});
      for (const auto& [spare, order] : giving) {
        comm::give_place(of_job, spare, order.epoch, order.rank, order.ranks);
      }
      store->add(links::beats_of(host), 1);
      std::vector<Order> told;
      for (; store->check({links::order_of(host, read)}); ++read) {
        told.push_back(links::order_from(store->get_to_str(links::order_of(host, read))));
      }
      const bool is_given_up = store->check({links::given_up_key(host)});
      const auto ended =
          store->check({links::job_over}) ? std::optional(std::stoi(store->get_to_str(links::job_over))) : std::nullopt;
      const auto known_now = is_met && wants ? ask_for_known() : known;
      std::lock_guard lock(mutex);
      known = known_now;
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

DecidingHost::DecidingHost(const std::string& address, uint16_t port, int host, milliseconds patience,
                           milliseconds to_come, const std::optional<std::vector<RankProcess>>& processes)
    : heard_(std::make_shared<Heard>()), patience_(patience) {
  heard_->host = host;
  try {
    const auto store = open_store(address, port, to_come);
    store->setTimeout(links::to_come);
    heard_->of_job = store;
    heard_->store = c10::make_intrusive<c10d::PrefixStore>(links::prefix, heard_->of_job);
  } catch (const std::exception& failure) {
    throw IoError("DecidingHost", cat("the launcher of the host that decides, at ", address, ":", port,
                                      ", is not reached: ", reason_of(failure)));
  }
  heard_->answered = Heard::Clock::now();
  try {
    if (processes) {
      heard_->store->set(links::come_over_key(host), links::text_of(*processes));
      heard_->met = true;
    }
    heard_->store->add(links::beats_of(host), 1);  // from now on it is missed
    if (heard_->store->add(links::launchers_of(host), 1) == 1) return;
  } catch (const std::exception& failure) {
    throw IoError("DecidingHost", cat("the launcher of the host that decides is gone: ", reason_of(failure)));
  }
  throw IoError("DecidingHost",
                cat("host ", host, " has been in this job before, and the job goes on without it: wait for ",
                    "its end, or end it, and start all hosts again"));
}

DecidingHost::~DecidingHost() {
  {
    std::lock_guard lock(heard_->mutex);
    if (heard_->abandoned) return;
  }
  report(links::host_left, {});
  limiter_.call([heard = heard_] { return heard->exchange(); }, std::chrono::seconds(1));
}

void DecidingHost::abandon() {
  std::lock_guard lock(heard_->mutex);
  heard_->abandoned = true;
}

void DecidingHost::report(int process, const os::Exit& exit) {
  std::lock_guard lock(heard_->mutex);
  heard_->to_say += cat(process, " ", exit.code, " ", exit.signal, " ");
}

void DecidingHost::close() {
  report(links::host_closes, {});
}

void DecidingHost::look() {
  {
    std::lock_guard lock(heard_->mutex);
    const bool knows = heard_->met && (!heard_->wants_known || !heard_->known->job.empty());
    const bool soon = heard_->to_say.empty() && heard_->places.empty() &&
                      Heard::Clock::now() - heard_->answered < (knows ? links::beat_every : links::look_every);
    if (soon || !heard_->broken.empty()) return;
  }
  if (!limiter_.busy()) limiter_.call([heard = heard_] { return heard->exchange(); }, milliseconds(0));
}

std::vector<Order> DecidingHost::orders() {
  std::lock_guard lock(heard_->mutex);
  return std::exchange(heard_->orders, {});
}

void DecidingHost::give_place(int64_t spare, const Order& order) {
  std::lock_guard lock(heard_->mutex);
  heard_->places.emplace_back(spare, order);
}

std::optional<int> DecidingHost::status() const {
  std::lock_guard lock(heard_->mutex);
  return heard_->status;
}

bool DecidingHost::is_alone() const {
  std::lock_guard lock(heard_->mutex);
  return heard_->is_alone();
}

bool DecidingHost::given_up() const {
  std::lock_guard lock(heard_->mutex);
  return heard_->given_up;
}

bool DecidingHost::may_be_succeeded() const {
  std::lock_guard lock(heard_->mutex);
  return Heard::Clock::now() - heard_->answered >= patience_ + to_be_succeeded;
}

bool DecidingHost::is_broken() const {
  std::lock_guard lock(heard_->mutex);
  return !heard_->broken.empty();
}

std::shared_ptr<const DecidingHost::Known> DecidingHost::known() const {
  std::lock_guard lock(heard_->mutex);
  heard_->wants_known = true;
  return heard_->known;
}

std::string DecidingHost::cut_off() const {
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
  TimeLimiter limiter;
  try {
    return limiter.call([=] { return open_store(address, port, limit) != nullptr; }, limit).value_or(false);
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace tesserae::comm
