#include "tesserae/launch/follower.h"

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/launch/rank_processes.h"
#include "tesserae/launch/take_over.h"
#include "tesserae/os/signal_numbers.h"

// How a host's part of a job ends:
//  1. Its ranks end, each of which is told to the launcher that decides.
//  2. This one waits for the job's status: others may go on without the ranks of this host, and it may be told to start
//     new ones.
//  3. It does not wait if it was asked to end (leaves()), or if there is nobody who would tell it: this host was cut
//     off, which kills its ranks, or the job survives no loss (DecidingHost::is_alone).
//  4. Where another host may take over (comm/succession.cpp), a host that is cut off follows the one that has, with its
//     ranks, or decides itself from then on.

namespace tesserae::launch {
namespace {

class Follower {
 public:
  explicit Follower(HostRanks& host)
      : host_(host),
        decider_(std::make_unique<comm::DecidingHost>(host.job.address, host.job.port, host.job.host,
                                                      host.job.host_patience)),
        take_over_(host) {
    host.meeting = {.port = host.job.port, .epoch = 0, .ranks = host.job.hosts * host.job.ranks};
    host.start_ranks();
  }

  std::variant<int, Inheritance> run() {
    while (std::ranges::any_of(host_.ranks, &LaunchedRank::is_running) || waits_for_status()) {
      host_.output.wait(host_.ranks, host_.spares, host_.ending.descriptor());
      follow();
      if (inheritance_) return std::move(*inheritance_);
      for (LaunchedRank& rank : host_.ranks) look_at(rank);
      look_at_signals();
      keep_spares();
      if (host_.ending.grace_has_passed()) kill_all();
    }
    host_.spares.keep(0);
    for (LaunchedRank& rank : host_.ranks) host_.output.drain(rank);
    if (host_.ending.has_begun()) kill_all();  // what the ranks started themselves
    return status();
  }

 private:
  bool waits_for_status() const {
    if (leaves() || over_ || cut_off_ || decider_->status() || decider_->is_alone()) return false;
    return decider_->cut_off().empty() || may_succeed();
  }

  /// This launcher was asked to end, and none of its ranks has ended the job well since: others may go on without them.
  bool leaves() const {
    const auto well = [this](const LaunchedRank& rank) {
      return rank.asked_to_end && !rank.is_running() && rank.ended_well(host_.job);
    };
    return host_.ending.is_asked() && std::ranges::none_of(host_.ranks, well);
  }

  void follow() {
    decider_->look();
    take_over_.note(*decider_);
    for (const comm::Order& order : decider_->orders()) obey(order);
    const std::string cut_off = decider_->cut_off();
    if (cut_off_ || over_ || (cut_off.empty() && !(take_over_.is_pending() && may_succeed()))) return;
    may_succeed() ? succeed(cut_off) : leave(cut_off);
  }

  void leave(const std::string& why) {
    cut_off_ = true;
    host_.output.print(cat("tesserae: ", why, "; the ranks of this host are killed"));
    kill_all();
  }

  // 4.

  bool may_succeed() const { return take_over_.possible() && !host_.ending.is_asked(); }

  void succeed(const std::string& why) {
    TakeOver::Next next = take_over_.next(*decider_, why);
    if (auto* const other = std::get_if<std::unique_ptr<comm::DecidingHost>>(&next)) {
      decider_->abandon();
      decider_ = std::move(*other);
    } else if (auto* const inheritance = std::get_if<Inheritance>(&next)) {
      decider_->abandon();
      inheritance_ = std::move(*inheritance);
    } else if (const auto* const over = std::get_if<TakeOver::Over>(&next)) {
      over_ = over->status;
      kill_all();
    } else if (const auto* const given_up = std::get_if<TakeOver::GivenUp>(&next)) {
      leave(cat(given_up->why, ", and the job has gone on without this one, or is over"));
    }
  }

  // 1 to 3.

  void obey(const comm::Order& order) {
    if (order.kind == comm::Order::Kind::start) return start(order);
    const auto found = std::ranges::find(host_.ranks, order.process, &LaunchedRank::number);
    if (found == host_.ranks.end()) return;
    order.kind == comm::Order::Kind::kill ? kill(*found) : void(found->rank = order.rank);
  }

  void start(const comm::Order& order) {
    if (cut_off_) return;
    const auto before = std::ranges::find(host_.ranks, order.local_rank, &LaunchedRank::local_rank);
    // It was told before it heard that this launcher is to end; or this host was started with fewer ranks.
    if (host_.ending.is_asked() || before == host_.ranks.end()) return decider_->report(order.process, given_up);
    if (host_.meeting.epoch != order.epoch) ++replaced_;
    host_.meeting.epoch = order.epoch;
    host_.meeting.ranks = order.ranks;
    host_.spares.pause();
    const Place place{.rank = order.rank, .local_rank = order.local_rank};
    try {
      if (auto spare = host_.spares.take(place)) {
        decider_->give_place(spare->number, order);
        *before = std::move(spare->process);
      } else {
        *before = start_rank(host_.job, place, host_.meeting, host_.sources);
      }
      before->number = order.process;
    } catch (const IoError& error) {
      host_.output.print(cat("tesserae: rank ", order.rank, " cannot be started: ", error.what()));
      decider_->report(order.process, {.code = 1});
    }
  }

  void look_at(LaunchedRank& rank) {
    if (rank.exit || !(rank.exit = rank.process->poll())) return;
    host_.output.drain(rank);
    decider_->report(rank.number, *rank.exit);
  }

  void look_at_signals() {
    const Ending::News news = host_.ending.look();
    if (news == Ending::News::asked_again) return host_.ending.cut_short();
    if (news == Ending::News::none) return;
    host_.output.print(stopping);
    for (LaunchedRank& rank : host_.ranks) rank.asked_to_end |= rank.is_running();
    decider_->close();
    host_.ending.ask(host_.ranks, host_.ending.passed_on(), host_.job.stop_grace);
  }

  void keep_spares() {
    const bool replaces = !decider_->status() && decider_->cut_off().empty() && !host_.ending.is_asked();
    host_.spares.keep(replaces ? host_.job.replacements - replaced_ : 0);
  }

  static void kill(LaunchedRank& rank) { rank.process->signal_group(os::signal_kill); }
  void kill_all() { std::ranges::for_each(host_.ranks, kill); }

  int status() const {
    const auto is_unusable = [](const LaunchedRank& rank) { return rank.exit->code == exit_unusable; };
    const bool unusable = decider_->is_alone() && std::ranges::any_of(host_.ranks, is_unusable);
    const int otherwise = leaves() ? 128 + host_.ending.signal() : unusable ? exit_unusable : exit_peer_lost;
    const int result = over_ ? *over_ : decider_->status().value_or(otherwise);
    if (result != 0 && !cut_off_ && !decider_->is_alone() && !leaves()) {
      host_.output.print(cat("tesserae: the job ends with status ", result, ", the host that decides says why"));
    }
    return result;
  }

  HostRanks& host_;
  std::unique_ptr<comm::DecidingHost> decider_;  // the host that decides
  TakeOver take_over_;
  std::optional<Inheritance> inheritance_;
  std::optional<int> over_;  // the job's status, as is known without that host
  bool cut_off_ = false;
  int replaced_ = 0;  // how often ranks of this host were
};

}  // namespace

std::variant<int, Inheritance> follow_deciding_host(HostRanks& host) {
  return Follower(host).run();
}

}  // namespace tesserae::launch
