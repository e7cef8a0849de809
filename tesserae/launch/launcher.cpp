#include "tesserae/launch/launcher.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <variant>

#include "tesserae/base/error.h"
#include "tesserae/comm/membership.h"
#include "tesserae/launch/follower.h"
#include "tesserae/launch/host_ranks.h"
#include "tesserae/launch/rank_processes.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/files.h"
#include "tesserae/os/process.h"
#include "tesserae/os/random_name.h"
#include "tesserae/os/signal_numbers.h"
#include "tesserae/os/signals.h"

// How a job ends:
//  0. A rank fails, and is replaced (comm/membership.cpp has the protocol): the job goes on. So many times; then:
//  1. A rank fails. The one that failed first is to blame, except that a rank which only lost a peer (exit_peer_lost)
//     waits a moment for a better culprit: the peer's own end may be noticed later.
//  2. From then on what other ranks write is withheld: it is about the loss, and would bury the cause.
//  3. SIGTERM (or the signal that this process got) to the ranks that are left; SIGKILL to their process groups when
//     the grace has passed.
//  4. All ranks are reaped; the report on the culprit is the last thing printed.
// A signal to this process enters at 3, with nobody to blame.

namespace tesserae::launch {
namespace {

constexpr auto blame_window = std::chrono::milliseconds(1000);
constexpr const char* replaced_key = "launcher/replaced";

std::string last_words(const LaunchedRank& rank) {
  const auto said = std::ranges::find_if_not(rank.last.rbegin(), rank.last.rend(), &std::string::empty);
  return said == rank.last.rend() ? rank.exit->text() : *said;
}

/// On several hosts. Where it does not, no launcher is told of the others.
bool survives_losses(const LocalJob& job) {
  return job.min_ranks > 0 || job.replacements > 0;
}

class Job {
 public:
  explicit Job(HostRanks& host) : host_(host), job_(host.job), ranks_(host.ranks) {
    if (job_.hosts == 1 || survives_losses(job_)) {
      const comm::Mandate mandate{.job = os::random_name()};
      const bool alone = job_.hosts == 1;
      membership_ = std::make_unique<comm::MembershipServer>(alone ? uint16_t{0} : job_.port, mandate,
                                                             alone ? comm::Serve::this_host : comm::Serve::network);
    }
    host.meeting = {.port = membership_ ? membership_->port() : job_.port, .ranks = job_.hosts * job_.ranks};
    if (membership_) host.meeting.epoch = 0;
    processes_.emplace(host, membership_.get());
    processes_->start();
  }

  /// Of a job that another host's launcher has begun.
  Job(HostRanks& host, Inheritance inherited)
      : host_(host), job_(host.job), ranks_(host.ranks), membership_(std::move(inherited.membership)) {
    host.job.address = inherited.claim.address;
    host.job.port = host.meeting.port = inherited.claim.port;
    processes_.emplace(host, *membership_, inherited);
    processes_->gather();
    if (processes_->deposed_by()) return;
    if (host.ending.has_news()) {
      membership_->end();
      return;
    }
    host.output.print(cat("tesserae: ", inherited.why, "; host ", job_.host, " decides from now on, and ", size(),
                          size() == 1 ? " rank is" : " ranks are", " left"));
    std::vector<std::string> names;
    for (const LaunchedRank& rank : ranks_) names.push_back(rank.name);
    number_anew();
    host.meeting.epoch = membership_->epoch() + 1;
    replaced_ = std::atoi(membership_->remembered(replaced_key).c_str());
    too_few_ = size() < job_.min_ranks;
    are_those_left_ = true;
    too_few_ ? membership_->end() : membership_->begin_epoch_of(names);
  }

  JobEnd run() {
    JobEnd end{.status = run_to_end()};
    if (!culprit_ || host_.ending.is_asked() || host_.ending.has_news()) return end;
    const LaunchedRank& rank = ranks_[static_cast<size_t>(*culprit_)];
    end.failed = rank.exit->signal != 0 || rank.exit->code != exit_unusable;
    if (rank.exit->signal == 0) end.error = last_words(rank);
    if (!membership_) return end;
    end.run = membership_->remembered("run");
    end.saved = membership_->remembered("saved");
    return end;
  }

 private:
  int run_to_end() {
    if (processes_->deposed_by()) return give_way();
    while (running() > 0 || (!lost_.empty() && !culprit_)) {
      host_.output.wait(ranks_, host_.spares, host_.ending.descriptor());
      processes_->look();
      if (processes_->deposed_by()) return give_way();
      for (size_t rank = 0; rank < ranks_.size(); ++rank) look_at(static_cast<int>(rank));
      look_at_signals();
      begin_next_epoch();
      keep_spares();
      see_off();
      blame_after_window();
      if (host_.ending.grace_has_passed()) kill_all();
    }
    host_.spares.keep(0);
    for (LaunchedRank& rank : ranks_) host_.output.drain(rank);
    blame(suspect_);
    excuse_late();
    if (host_.ending.has_begun()) kill_all();        // what the ranks started themselves
    for (LaunchedRank& rank : leaving_) kill(rank);  // their hosts wait for them
    const int result = status();
    processes_->end(result);
    if (processes_->deposed_by()) return give_way();
    forget_memory();
    return result;
  }

  /// Another host decides, since nothing was heard of this one.
  int give_way() {
    const int by = *processes_->deposed_by();
    const std::string now = by == job_.host ? "the job is over" : cat("host ", by, " decides on the job now");
    host_.output.print(
        cat("tesserae: ", now, ", since nothing was heard of this one; the ranks of this host are killed"));
    host_.spares.keep(0);
    for (LaunchedRank& rank : ranks_) {
      if (rank.process) kill(rank);
    }
    return exit_peer_lost;
  }

  /// What a script's ranks kept in memory for each other (tsm.elastic): nobody is left to go on from it.
  void forget_memory() {
    const os::Path kept = membership_ ? membership_->remembered("memory") : "";
    if (kept.empty() || kept.parent_path() != job_.memory) return;
    try {
      os::files().remove_all(kept);
    } catch (const IoError& error) {
      host_.output.print(cat("tesserae: ", error.what()));
    }
  }

  int running() const { return static_cast<int>(std::ranges::count_if(ranks_, &LaunchedRank::is_running)); }

  std::optional<os::Exit> exit_of_process(LaunchedRank& rank) const {
    if (const auto exit = processes_->exit_of(rank)) return exit;
    // What others have been asked to kill is not waited for.
    return !rank.process && host_.ending.grace_has_passed() ? std::optional(given_up) : std::nullopt;
  }

  void kill(LaunchedRank& rank) { processes_->kill(rank); }
  void kill_all() {
    for (LaunchedRank& rank : ranks_) kill(rank);
  }

  void look_at(int number) {
    LaunchedRank& rank = ranks_[number];
    if (rank.exit || !(rank.exit = exit_of_process(rank))) return;
    host_.output.drain(rank);
    if (rank.ended_well(job_)) {
      if (membership_) membership_->end();  // whoever still meets others has nobody to meet
      return;
    }
    if (may_replace(rank)) return lost_.push_back(number);
    if (culprit_ || host_.ending.is_asked()) return;
    if (number != 0 && replaced_ > 0 && rank.exit->code == exit_peer_lost && any_ended_well()) {
      return late_.push_back(number);
    }
    const bool only_lost_a_peer = rank.exit->signal == 0 && rank.exit->code == exit_peer_lost;
    if (!only_lost_a_peer) return blame(number);
    if (!suspect_) {
      suspect_ = number;
      host_.output.show_only(rank);
      blame_suspect_at_.emplace(blame_window);
    }
  }

  /// One that only lost a peer has found nothing to go on from. After a signal, one that was killed: others may still
  /// be able to save. What was asked to end and does so is not lost.
  bool may_replace(const LaunchedRank& rank) const {
    if (!membership_ || too_few_ || culprit_ || host_.ending.is_asked_again() || host_.ending.grace_has_passed())
      return false;
    if (job_.replacements == 0 && job_.min_ranks == 0) return false;
    if (host_.ending.is_asked()) return rank.exit->signal != 0 && rank.exit->signal != host_.ending.passed_on();
    return rank.exit->signal != 0 || (rank.exit->code != exit_peer_lost && rank.exit->code != exit_unusable);
  }

  /// If ranks are lost, or another number of them is wanted. Once all ranks have been looked at.
  void begin_next_epoch() {
    if (!membership_ || culprit_) return;
    for (const int missing : missing_ranks()) end_missing(ranks_[static_cast<size_t>(missing)]);
    const std::optional<int> asked = membership_->asked_ranks();
    const int ranks = asked.value_or(size());
    std::erase_if(lost_, [ranks](int number) { return number >= ranks; });
    const bool all_failed = !asked && running() > 0 && membership_->failed() >= running();
    const bool loss = all_failed || !lost_.empty();
    if (!loss && !asked) return;
    const auto failed = std::ranges::count_if(lost_, [this](int number) { return exit_of(number).signal == 0; });
    if (failed > 0 && !failures_settled_) failures_settled_.emplace(blame_window);
    const bool spent = loss && (replaced_ >= job_.replacements || is_host_lost());
    const bool with_fewer = spent && may_have_fewer();
    const bool meets_again = spent && lost_.empty() && may_meet_again();
    // What several ranks fail of at a time, new ones would fail of, too.
    const bool some_have_ended = host_.ending.is_asked() && running() + static_cast<int>(lost_.size()) < size();
    if (any_ended_well() || some_have_ended || failed > 1 || (spent && !with_fewer && !meets_again)) {
      membership_->end();
      return lost_.empty() ? void() : blame(lost_.front());
    }
    if (failures_settled_ && !failures_settled_->passed()) return;
    failures_settled_.reset();
    host_.meeting.epoch = membership_->epoch() + 1;
    if (with_fewer) return go_on_with_those_left();
    if (meets_again) ++met_again_;
    if (loss && !meets_again) membership_->remember({{replaced_key, std::to_string(++replaced_)}});
    resize(ranks);
    for (const int number : std::exchange(lost_, {})) {
      LaunchedRank& rank = ranks_[static_cast<size_t>(number)];
      host_.output.print(
          cat(how_ended(number), "; a new process takes its place (", replaced_, " of ", job_.replacements, ")"));
      kill(rank);  // what it had started itself
      rank = processes_->start_one(number, rank.host, ranks_);
    }
    host_.spares.pause();
    if (meets_again && are_those_left_) return begin_epoch_of_all();
    are_those_left_ = false;
    membership_->begin_epoch(size());
  }

  /// They are as before those that are left, of whom none has a place in the job's state yet.
  void begin_epoch_of_all() {
    std::vector<int> all(static_cast<size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    membership_->begin_epoch_of(all);
  }

  /// Two sides of a link that is cut say it of each other: then the ranks of the host that decides are believed.
  std::vector<int> missing_ranks() {
    const auto told = membership_->missing();
    const auto is_blamed = [&](int host) {
      return std::ranges::any_of(
          told, [&](const auto& each) { return host_of(each.by) == job_.host && host_of(each.rank) == host; });
    };
    std::vector<int> missing;
    for (const auto& [by, rank] : told) {
      if (rank < 0 || rank >= size()) continue;
      const bool of_each_other = host_of(by) != job_.host && host_of(rank) == job_.host && is_blamed(host_of(by));
      if (!of_each_other) missing.push_back(rank);
    }
    return missing;
  }

  void end_missing(LaunchedRank& rank) {
    if (!rank.is_running() || std::exchange(rank.is_missing, true)) return;
    host_.output.print(cat("tesserae: rank ", rank.rank, " of ", size(),
                           " is killed: it stopped or hangs, and the others waited for it to their deadline"));
    kill(rank);
  }

  /// That of a rank which was not replaced yet: nothing starts there any more.
  bool is_host_lost() const {
    return std::ranges::any_of(lost_, [this](int number) { return processes_->starts_none(host_of(number)); });
  }

  /// As many as can still be needed.
  void keep_spares() {
    const bool replaces = membership_ && !host_.ending.is_asked();
    host_.spares.keep(replaces ? job_.replacements - replaced_ : 0);
  }

  /// A rank that only lost a peer ends the job, in a moment.
  bool may_have_fewer() const {
    const int left = size() - static_cast<int>(lost_.size());
    return job_.min_ranks > 0 && left >= job_.min_ranks && !lost_.empty() && !suspect_;
  }

  /// All failed and none has ended: as often as the job could lose a rank, since what is wrong may stay so.
  bool may_meet_again() const { return met_again_ < size() - job_.min_ranks && job_.min_ranks > 0; }

  /// From the next epoch on each has the number of its place among those that are left.
  void go_on_with_those_left() {
    std::vector<int> left;
    std::vector<LaunchedRank> ranks;
    for (int number = 0; number < size(); ++number) {
      LaunchedRank& rank = ranks_[static_cast<size_t>(number)];
      if (std::ranges::find(lost_, number) == lost_.end()) {
        left.push_back(number);
        ranks.push_back(std::move(rank));
        continue;
      }
      host_.output.print(cat(how_ended(number), "; none takes its place, the job goes on with fewer"));
      kill(rank);  // what it had started itself
    }
    ranks_ = std::move(ranks);
    number_anew();
    lost_.clear();
    are_those_left_ = true;
    membership_->begin_epoch_of(left);
  }

  /// Each has the number of its place.
  void number_anew() {
    for (int number = 0; number < size(); ++number) processes_->number(ranks_[static_cast<size_t>(number)], number);
    host_.meeting.ranks = size();
  }

  /// From the next epoch on. Where new ranks cannot be started the job keeps the number that it has: they all have
  /// saved their state.
  void resize(int ranks) {
    const int before = size();
    for (; size() > ranks; ranks_.pop_back()) leaving_.push_back(std::move(ranks_.back()));
    leave_by_.emplace(job_.stop_grace);
    host_.meeting.ranks = ranks;
    try {
      if (processes_->has_other_hosts() && size() < ranks)
        throw IoError("tesserae", "a job on several hosts gets no more ranks");
      while (size() < ranks) ranks_.push_back(processes_->start_one(size(), job_.host, ranks_));
    } catch (const IoError& error) {
      host_.output.print(
          cat("tesserae: the job keeps its ", before, " ranks, a new one cannot be started: ", error.what()));
      host_.meeting.ranks = before;
      while (size() > before) ranks_.pop_back();
    }
  }

  /// Those that have no place any more: nothing depends on how they end.
  void see_off() {
    std::erase_if(leaving_, [this](LaunchedRank& rank) {
      const bool late = leave_by_->passed();
      if (late) kill(rank);
      return late || exit_of_process(rank);
    });
  }

  int size() const { return static_cast<int>(ranks_.size()); }

  std::string how_ended(int number) const {
    const os::Exit& exit = exit_of(number);
    const int ranks = membership_ ? size() : host_.meeting.ranks;
    const std::string who = cat("tesserae: rank ", ranks_[static_cast<size_t>(number)].rank, " of ", ranks);
    const int host = host_of(number);
    if (processes_->is_given_up(host)) {
      return cat(who, " is lost with host ", host, ", of which nothing is heard");
    }
    return cat(who, exit.signal != 0 ? " was " : " ", exit.text());
  }

  /// On several hosts, of a rank there; whoever is none counts as this host's.
  int host_of(int number) const {
    return number < 0 || number >= size() ? job_.host : ranks_[static_cast<size_t>(number)].host;
  }

  const os::Exit& exit_of(int number) const { return *ranks_[static_cast<size_t>(number)].exit; }

  void blame_after_window() {
    if (blame_suspect_at_ && blame_suspect_at_->passed()) blame(suspect_);
  }

  void blame(std::optional<int> rank) {
    if (culprit_ || !rank) return;
    culprit_ = rank;
    blame_suspect_at_.reset();
    host_.output.show_none();
    if (membership_) membership_->end();
    host_.ending.ask(ranks_, os::signal_terminate, job_.failure_grace);
  }

  void look_at_signals() {
    const Ending::News news = host_.ending.look();
    if (news == Ending::News::asked_again) return host_.ending.cut_short();
    if (news == Ending::News::none || culprit_) return;
    host_.output.print(stopping);
    host_.ending.ask(ranks_, host_.ending.passed_on(), job_.stop_grace);
  }

  /// Those that came in place of a rank which was lost in the job's last moments met nobody. If rank 0 is done, so is
  /// the work.
  void excuse_late() {
    if (late_.empty()) return;
    const std::optional<os::Exit> first = ranks_.front().exit;
    for (const int number : late_) {
      if (ranks_.front().ended_well(job_)) {
        ranks_[static_cast<size_t>(number)].exit = first;
      } else {
        blame(number);
      }
    }
  }

  bool any_ended_well() const {
    return std::ranges::any_of(
        ranks_, [this](const LaunchedRank& rank) { return !rank.is_running() && rank.ended_well(job_); });
  }

  int status() {
    if (ranks_.empty()) return 128 + host_.ending.signal();
    if (too_few_) {
      host_.output.print(cat("tesserae: these are fewer than the ", job_.min_ranks, " that the job needs"));
      return exit_peer_lost;
    }
    if (!culprit_) {
      const bool all_well =
          std::ranges::all_of(ranks_, [this](const LaunchedRank& rank) { return rank.ended_well(job_); });
      if (!all_well) return 128 + host_.ending.signal();
      return std::ranges::max_element(ranks_, {}, [](const LaunchedRank& rank) { return rank.exit->code; })->exit->code;
    }
    const LaunchedRank& rank = ranks_[*culprit_];
    const std::string others = size() > 1 ? cat("; the other ranks were ended") : "";
    host_.output.print(cat(how_ended(*culprit_), others));
    host_.output.repeat(rank);
    return rank.exit->signal != 0 ? 128 + rank.exit->signal : rank.exit->code;
  }

  HostRanks& host_;
  const LocalJob& job_;
  std::vector<LaunchedRank>& ranks_;
  std::unique_ptr<comm::MembershipServer> membership_;
  std::optional<RankProcesses> processes_;
  bool too_few_ = false;                          // were left when this launcher took over
  std::vector<LaunchedRank> leaving_;             // they have no place since the job became smaller
  std::optional<os::Deadline> leave_by_;          // what is left of them is killed then
  std::vector<int> lost_;                         // and not replaced yet
  std::vector<int> late_;                         // met nobody, since others were done
  std::optional<os::Deadline> failures_settled_;  // until then others may fail of the same
  int replaced_ = 0;                              // how often
  bool are_those_left_ = false;                   // of a loss, and no number of ranks was asked for since
  int met_again_ = 0;                             // how often, without a loss and beside those
  std::optional<int> suspect_, culprit_;
  std::optional<os::Deadline> blame_suspect_at_;
};

}  // namespace

int run_local_job(const LocalJob& job) {
  return run_job(job).status;
}

JobEnd run_job(const LocalJob& job) {
  if (job.ranks < 1 || job.command.empty()) {
    throw InvalidArgument("run_local_job", cat("needs a command and at least one rank, got ", job.ranks, " ranks"));
  }
  if (job.host < 0 || job.host >= job.hosts || (job.hosts > 1 && job.port == 0)) {
    throw InvalidArgument("run_local_job", cat("host ", job.host, " of ", job.hosts, " hosts, which meet at ",
                                               job.address, ":", job.port, ": give its number and where they meet"));
  }
  os::survive_broken_pipes();
  os::keep_ended_children();
  HostRanks host(job);
  if (job.hosts == 1 || job.min_ranks == 0) host.job.succession.clear();
  host.server.start();
  const bool decides = job.hosts == 1 || job.host == 0 || !survives_losses(job);
  if (decides) return Job(host).run();
  auto end = follow_deciding_host(host);
  if (const int* const status = std::get_if<int>(&end)) return {.status = *status};
  return Job(host, std::get<Inheritance>(std::move(end))).run();
}

}  // namespace tesserae::launch
