// One thread, one state and the constants that its decisions share: how a blocked operation becomes a verdict is read
// from top to bottom, so it is one file.
#include "tesserae/comm/liveness/liveness.h"

#include <c10/util/thread_name.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "tesserae/base/log.h"
#include "tesserae/comm/rank_list.h"
#include "tesserae/os/host.h"
#include "tesserae/os/process.h"

namespace tesserae::comm {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTick{100};
// An operation that has blocked this long is looked at.
constexpr milliseconds kSlow{400};
// One that has blocked this long checks its connections, and again later.
constexpr milliseconds kCheck{600};
// One that has blocked this long is told to the other members, who compare it with theirs.
constexpr milliseconds kTellSlow{1500};
// What a lost rank had sent may still arrive and complete the operation.
constexpr milliseconds kGrace{300};
// So long before the deadline one begins to look who beats.
constexpr milliseconds kObserve = 2 * Pulses::silence;
// A rank whose connection broke and that does not beat for this long is lost, even where nobody watches its process.
constexpr milliseconds kBroken{1000};
// A rank that beats, though its connection broke: nobody else blames another one for so long, so it is the one to name.
constexpr milliseconds kPatience{2500};
constexpr milliseconds kStoreTimeout = AskedStore::patience;
// A rank that was in some operation within this time is in one for the others: between two it computes.
constexpr milliseconds kBusy{2000};
// A collective over shared memory that still blocks after so many looks since a member left will not end: what that
// member had given lies there. Looks and not time, since this process may have been stopped meanwhile.
constexpr int kDeserted = 4;
// After the goodbye, an operation that still blocks gets this long.
constexpr milliseconds kFarewell{5000};

// A thousand ranks may beat into one store.
milliseconds beat_interval(int ranks) {
  return std::max(milliseconds(250), milliseconds(2 * ranks));
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

}  // namespace

void Liveness::introduce(int rank, const c10::intrusive_ptr<c10d::Store>& store) {
  LivenessStore told(store);
  if (rank == 0) told.open();
  told.introduce(rank, {os::host_identity(), os::process_id(), os::start_time(os::process_id()).value_or(0)});
}

Liveness::Liveness(const mesh::World& world, c10::intrusive_ptr<c10d::Store> store, int server)
    : world_(world),
      server_(server),
      beat_(beat_interval(world.size())),
      store_(std::make_shared<LivenessStore>(std::move(store)),
             [this] {
               if (server_ >= 0 && server_ != world_.rank()) mark_lost(server_, "the store that it serves is gone");
             }),
      missing_ranks_(store_, world.size(), world.rank(), server, beat_),
      next_beat_(Clock::now()) {
  const std::string here = os::host_identity();
  for (const int rank : world.host_ranks(world.rank())) {
    if (rank == world.rank()) continue;
    const auto identity = [number = world.launcher_rank(rank)](LivenessStore& told) { return told.identity(number); };
    const std::optional<LivenessStore::Identity> peer = store_.ask(identity, 5 * kStoreTimeout);
    if (!peer) {  // whoever serves the store is stopped or gone
      log(LogLevel::warning, "the store of the job does not say where ranks run: not all of this host are watched");
      break;
    }
    if (peer->host != here) continue;  // the label of its host says otherwise: it cannot be watched here
    const auto peer_started = peer->started ? std::optional(peer->started) : std::nullopt;
    local_.push_back({rank, os::ProcessWatch(static_cast<pid_t>(peer->process), peer_started)});
  }
  thread_ = std::thread([this] { run(); });
}

Liveness::~Liveness() {
  leave();
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  thread_.join();
}

void Liveness::watch(Watched* group) {
  std::lock_guard lock(mutex_);
  cases_.emplace(group, Case{});
}

void Liveness::forget(Watched* group) {
  std::unique_lock lock(mutex_);
  cases_.erase(group);
  changed_.wait(lock, [&] { return examined_ != group; });
}

Verdict Liveness::judge(const Watched& group, int suspect, const std::string& symptom) {
  std::unique_lock lock(mutex_);
  auto& state = cases_.at(const_cast<Watched*>(&group));
  if (!state.asked) {
    state.asked = Clock::now();
    state.suspect = suspect;
    state.symptom = symptom;
  }
  changed_.wait_for(lock, kPatience + Pulses::silence + 2 * kStoreTimeout, [&] { return state.verdict.has_value(); });
  return state.verdict.value_or(Verdict{Verdict::Kind::lost, {suspect}, symptom});
}

Verdict Liveness::dispute(const Watched& group, const Verdict& verdict) {
  std::unique_lock lock(mutex_);
  auto& state = cases_.at(const_cast<Watched*>(&group));
  if (!state.dispute) state.dispute = verdict;
  changed_.wait_for(lock, 2 * kStoreTimeout, [&] { return state.verdict.has_value(); });
  return state.verdict.value_or(verdict);
}

std::vector<int> Liveness::lost() const {
  std::lock_guard lock(mutex_);
  return lost_;
}

void Liveness::leave() {
  std::unique_lock lock(mutex_);
  if (!leaving_) leaving_since_ = Clock::now();
  leaving_ = true;
  changed_.wait_for(lock, 2 * kStoreTimeout, [&] { return has_left_; });
}

void Liveness::give_up() {
  {
    std::lock_guard lock(mutex_);
    giving_up_ = true;
  }
  leave();
}

void Liveness::wait_for_others(milliseconds at_most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, at_most, [&] {
    std::vector<int> gone = left_;
    for (const int rank : lost_) {
      if (!contains(gone, rank)) gone.push_back(rank);
    }
    return static_cast<int>(gone.size()) >= world_.size();
  });
}

void Liveness::run() {
  c10::setThreadName("tsm-liveness");
  for (;;) {
    watch_processes();
    exchange_news();
    std::vector<Watched*> groups;
    bool leaving = false;
    {
      std::lock_guard lock(mutex_);
      if (ending_) return;
      leaving = leaving_;
      for (const auto& [group, state] : cases_) groups.push_back(group);
    }
    // Who has failed is not waited for: it may say so a moment before others come to their deadlines.
    bool waits = waits_ > 0 || has_failed_;
    for (auto* group : groups) waits |= examine(group);
    if (waits) last_pending_ = Clock::now();
    waits_for_others_.set(!leaving && Clock::now() - last_pending_ < kBusy);
    tell_of_waiting();
    look_for_missing();
  }
}

// Sleeps for one tick, or until a process of this host ends.
void Liveness::watch_processes() {
  std::vector<int> descriptors;
  for (const auto& peer : local_) descriptors.push_back(peer.watch.descriptor());
  os::wait_readable(descriptors, os::Deadline(kTick));
  std::erase_if(local_, [&](const auto& peer) {
    const bool gone = peer.watch.gone();
    if (gone) ended_.push_back(peer.rank);
    return gone;
  });
  if (ended_.empty()) return;
  // A rank that ended after another one was lost has usually told so before: the store knows the order, and who left.
  next_beat_ = Clock::now();
  exchange_news();
  // Who ends while the store's rank is silent may have given up on that rank, and its goodbye has not arrived.
  if (missing_ranks_.server_is_silent()) return;
  for (const int rank : std::exchange(ended_, {})) mark_lost(rank, "its process ended");
}

void Liveness::mark_lost(int rank, const std::string& how) {
  {
    std::lock_guard lock(mutex_);
    if (contains(lost_, rank) || contains(left_, rank) || leaving_) return;
    lost_.push_back(rank);
    lost_since_ = Clock::now();
  }
  log(LogLevel::warning, cat("rank ", rank, " is lost: ", how));
  untold_.push_back(rank);
  tell_of_lost();
}

/// Also of those that could not be told of while the store stalled.
void Liveness::tell_of_lost() {
  if (untold_.empty()) return;
  const auto told = store_.ask([ranks = untold_](LivenessStore& store) {
    for (const int rank : ranks) store.report_lost(rank);
    return true;
  });
  if (told) untold_.clear();
}

void Liveness::exchange_news() {
  bool say_goodbye = false, gives_up = false;
  {
    std::lock_guard lock(mutex_);
    say_goodbye = leaving_ && !has_left_;
    gives_up = giving_up_;
    if (!say_goodbye && Clock::now() < next_beat_) return;
  }
  next_beat_ = Clock::now() + beat_;
  tell_of_lost();
  const auto news = store_.ask([say_goodbye, gives_up, self = world_.rank()](LivenessStore& store) {
    if (say_goodbye) store.report_left(self, gives_up);
    store.beat(self);
    return store.gone();
  });
  std::lock_guard lock(mutex_);
  if (say_goodbye) has_left_ = true;
  if (news) {
    const auto add_new = [](std::vector<int>& known, const std::vector<int>& told) {
      std::vector<int> merged = told;  // the store's order first, then what it does not know yet
      for (const int rank : known) {
        if (!contains(merged, rank)) merged.push_back(rank);
      }
      const bool grown = merged.size() > known.size();
      known = std::move(merged);
      return grown;
    };
    if (add_new(lost_, news->lost)) lost_since_ = Clock::now();
    add_new(left_, news->left);
    given_up_ = news->given_up;
  }
  changed_.notify_all();
}

std::vector<int> Liveness::gone_among(const std::vector<int>& members) const {
  std::lock_guard lock(mutex_);
  std::vector<int> gone = others_among(members, lost_);
  for (const int rank : others_among(members, left_)) gone.push_back(rank);
  return gone;
}

std::vector<int> Liveness::others_among(const std::vector<int>& members, const std::vector<int>& ranks) const {
  std::vector<int> found;
  for (const int rank : ranks) {
    if (rank != world_.rank() && contains(members, rank)) found.push_back(rank);
  }
  return found;
}

std::vector<int> Liveness::living() const {
  std::vector<int> ranks;
  std::lock_guard lock(mutex_);
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (!contains(lost_, rank) && !contains(left_, rank)) ranks.push_back(rank);
  }
  return ranks;
}

bool Liveness::examine(Watched* group) {
  Case state;
  {
    std::lock_guard lock(mutex_);
    const auto found = cases_.find(group);
    if (found == cases_.end() || found->second.verdict) return false;
    state = found->second;
    examined_ = group;
  }
  const auto pending = group->pending();
  const auto verdict = decide(group, state, pending);
  if (verdict) group->abort(*verdict);
  std::lock_guard lock(mutex_);
  if (const auto found = cases_.find(group); found != cases_.end()) {
    found->second.reported = state.reported;
    found->second.deserted = state.deserted;
    found->second.looks = state.looks;
    found->second.next_look = state.next_look;
    found->second.next_check = state.next_check;
    found->second.verdict = verdict;
  }
  if (verdict) {
    has_failed_ = true;
    note_missing(*verdict);
  }
  examined_ = nullptr;
  changed_.notify_all();
  return pending.has_value();
}

// With the mutex.
void Liveness::note_missing(const Verdict& verdict) {
  if (!verdict.is_timeout()) return;
  std::ranges::copy_if(verdict.ranks, std::back_inserter(missing_),
                       [this](int rank) { return !contains(missing_, rank); });
}

std::vector<int> Liveness::missing() const {
  std::lock_guard lock(mutex_);
  return missing_;
}

void Liveness::tell_of_waiting() {
  const bool waits = process_waits();
  if (waits == told_waiting_) return;
  told_waiting_.reset();  // a request that is given up may be carried out later
  const auto told = store_.ask(
      [waits, self = world_.rank()](LivenessStore& store) { return store.report_waiting(self, waits), true; });
  if (told) told_waiting_ = waits;
}

void Liveness::look_for_missing() {
  std::optional<Question> question;
  {
    std::lock_guard lock(mutex_);
    question = question_;
  }
  if (!question) return;
  auto found = missing_ranks_.verdict(question->members, living(), "", question->deadline);
  std::lock_guard lock(mutex_);
  if (!found || !question_ || question_->number != question->number) return;
  question_.reset();
  found_ = std::move(found);
  changed_.notify_all();
}

void Liveness::time_out(std::string_view function, const std::string& message, const std::vector<int>& members,
                        milliseconds deadline) {
  std::lock_guard alone(asking_);
  std::unique_lock lock(mutex_);
  found_.reset();
  question_ = Question{++questions_, members, deadline};
  changed_.wait_for(lock, kObserve + AbsentRanks::confirmation(deadline) + 2 * kStoreTimeout,
                    [&] { return found_.has_value(); });
  question_.reset();
  const Verdict verdict = found_.value_or(Verdict{Verdict::Kind::timeout, {}, ""});
  note_missing(verdict);
  const std::string who = verdict.missing(), text = who.empty() ? message : cat(message, "; ", who);
  const bool absent = verdict.kind == Verdict::Kind::absent;
  timed_out_ = absent ? Timeout(function, text, {}, verdict.ranks) : Timeout(function, text, verdict.ranks);
  throw *timed_out_;
}

std::optional<Timeout> Liveness::take_time_out() {
  std::lock_guard lock(mutex_);
  return std::exchange(timed_out_, std::nullopt);
}

std::optional<Verdict> Liveness::decide(Watched* group, Case& state, const std::optional<Watched::Pending>& pending) {
  const auto now = Clock::now();
  const auto& members = group->watched_members();
  const bool asked = state.asked.has_value();
  std::vector<int> lost, left, given_up_for, lost_of_job;
  Clock::time_point lost_since;
  {
    std::lock_guard lock(mutex_);
    lost_of_job = lost_;
    if (given_up_) given_up_for = lost_.empty() ? left_ : lost_;
    if (leaving_ && pending && (giving_up_ || now - std::max(leaving_since_, pending->since) >= kFarewell)) {
      return Verdict{Verdict::Kind::timeout, {}, "this rank left the job while it waited"};
    }
    lost = others_among(members, lost_);
    left = others_among(members, left_);
    lost_since = lost_since_;
  }
  // Within the grace the operation may still complete, and news of an earlier loss may still come.
  if (!lost.empty()) {
    if (now - lost_since < kGrace && !asked) return std::nullopt;
    return Verdict{Verdict::Kind::lost, lost, "its process or its host is gone"};
  }
  if (pending && !given_up_for.empty()) return Verdict{Verdict::Kind::lost, given_up_for, "others have given up"};
  // Whoever served the store may be gone with the lost, and those that give up have nowhere to say so.
  const bool unheard = !lost_of_job.empty() && store_.is_gone();
  if (pending && unheard && now - std::max(lost_since, pending->since) >= kBroken) {
    return Verdict{Verdict::Kind::lost, lost_of_job,
                   "the store of the job is gone with it: others may have given up, and cannot say so"};
  }
  if (state.dispute) return conclude(group, *state.dispute);
  std::vector<int> needed = left;
  if (pending && pending->sequence == 0) {
    std::erase_if(needed, [&](int rank) { return std::ranges::find(pending->peers, rank) == pending->peers.end(); });
  }
  if (!needed.empty() && pending && !group->notices_departures()) {
    if (std::exchange(state.deserted, pending->since) != pending->since) state.looks = 0;
    if (++state.looks > kDeserted) return Verdict{Verdict::Kind::lost, needed, "it left the job"};
  }
  const auto blocked = pending ? now - pending->since : Clock::duration::zero();
  if (!asked && (blocked < kSlow || now < state.next_look)) return std::nullopt;
  state.next_look = now + beat_;

  if (pending && blocked >= kCheck && now >= state.next_check) {
    state.next_check = now + 2 * kCheck;
    group->check_connections();
  }
  const auto told = store_.ask([name = group->watched_name()](LivenessStore& store) { return store.verdict(name); });
  if (told && *told) return without_this_rank(**told);
  const auto deadline = group->watched_deadline();
  if (pending && blocked >= deadline) {
    const std::string text = cat("the deadline of ", deadline.count(), " ms passed");
    auto verdict = missing_ranks_.verdict(members, living(), text, deadline);
    return verdict ? std::optional(conclude(group, *std::move(verdict))) : std::nullopt;
  }
  if (asked || (pending && blocked >= deadline - kObserve)) missing_ranks_.silent_of(members);
  if (pending && blocked >= kTellSlow) {
    if (auto mismatch = find_mismatch(group, state, *pending)) return conclude(group, std::move(*mismatch));
  }
  if (!asked) return std::nullopt;
  if (!left.empty()) return Verdict{Verdict::Kind::lost, left, "it left the job"};
  const auto asked_for = now - *state.asked;
  if (missing_ranks_.server_is_silent() && state.suspect != server_) {
    if (asked_for < kPatience) return std::nullopt;
    return Verdict{Verdict::Kind::timeout, {server_}, state.symptom};
  }
  if (missing_ranks_.has_been_still(state.suspect, kBroken)) {
    mark_lost(state.suspect, "its connection broke and it does not beat");
    return Verdict{Verdict::Kind::lost, {state.suspect}, state.symptom};
  }
  if (asked_for < kPatience) return std::nullopt;
  return conclude(group, {Verdict::Kind::lost, {state.suspect}, state.symptom});
}

Verdict Liveness::conclude(Watched* group, Verdict verdict) {
  const auto first = store_.ask(
      [name = group->watched_name(), verdict](LivenessStore& store) { return store.report_verdict(name, verdict); });
  return without_this_rank(first.value_or(verdict));
}

// Another member may name this one, which waits now.
Verdict Liveness::without_this_rank(Verdict verdict) const {
  if (verdict.kind == Verdict::Kind::absent) std::erase(verdict.ranks, world_.rank());
  if (verdict.kind == Verdict::Kind::absent && verdict.ranks.empty()) verdict.kind = Verdict::Kind::timeout;
  return verdict;
}

// If any two members are in different operations, one of the two differs from member 0: to compare with it is enough.
std::optional<Verdict> Liveness::find_mismatch(Watched* group, Case& state, const Watched::Pending& pending) {
  if (pending.sequence == 0 || Clock::now() - pending.since < kTellSlow) return std::nullopt;
  const int self = world_.rank(), first = group->watched_members().front();
  const std::string own = cat(pending.sequence, " ", pending.text);
  const bool tell = state.reported != own;
  state.reported = own;
  const auto theirs = store_.ask([=, name = group->watched_name()](LivenessStore& store) {
    if (tell) store.report_slow(name, self, {pending.sequence, pending.text});
    return first == self ? std::nullopt : store.slow(name, first);
  });
  if (!theirs || !*theirs) return std::nullopt;
  const auto& [sequence, text] = **theirs;
  if (sequence != pending.sequence || text == pending.text) return std::nullopt;
  return Verdict{
      Verdict::Kind::mismatch, {}, cat("rank ", first, " called ", text, ", rank ", self, " called ", pending.text)};
}

}  // namespace tesserae::comm
