#include "tesserae/comm/liveness.h"

#include <c10/util/thread_name.h>

#include <algorithm>

#include "tesserae/base/log.h"
#include "tesserae/comm/error.h"
#include "tesserae/os/host.h"
#include "tesserae/os/process.h"

namespace tesserae::comm {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTick{100};
// An operation that has blocked this long is looked at.
constexpr milliseconds kSlow{400};
// One that has blocked this long is told to the other members, who compare it with theirs.
constexpr milliseconds kTellSlow{1500};
// What a lost rank had sent may still arrive and complete the operation.
constexpr milliseconds kGrace{300};
// A rank that has not beaten for this long is silent. A busy machine may hold a thread up for a second.
constexpr milliseconds kSilence{3000};
constexpr milliseconds kLively{1000};
// So long before the deadline one begins to look who beats.
constexpr milliseconds kObserve = 2 * kSilence;
// A broken connection whose other side nobody reports lost.
constexpr milliseconds kPatience{1500};
constexpr milliseconds kStoreTimeout{2000};
// After the goodbye, an operation that still blocks gets this long.
constexpr milliseconds kFarewell{5000};

// A thousand ranks may beat into one store.
milliseconds beat_interval(int ranks) {
  return std::max(milliseconds(250), milliseconds(2 * ranks));
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::string join(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

void Verdict::raise(const std::string& what) const {
  const std::string because = text.empty() ? "" : ": " + text;
  switch (kind) {
    case Kind::lost:
      throw PeerLost("Group", cat(what, ": lost ", join(ranks), because), ranks);
    case Kind::timeout:
      throw Timeout("Group",
                    cat(what, ": ", text, "; ",
                        ranks.empty() ? "all ranks are alive, so one of them did not call it"
                                      : cat("no sign of life from ", join(ranks))),
                    ranks);
    case Kind::mismatch:
      throw Mismatch("Group", cat(what, ": the ranks disagree: ", text));
  }
  throw CommError("Group", what);
}

Liveness::Liveness(const mesh::World& world, c10::intrusive_ptr<c10d::Store> store, int server)
    : world_(world), server_(server), beat_(beat_interval(world.size())), notes_(store), next_beat_(Clock::now()) {
  const int self = world.rank();
  const auto started = os::start_time(os::process_id());
  if (self == 0) notes_.open();
  notes_.introduce(self, {os::host_identity(), os::process_id(), started.value_or(0)});
  for (const int rank : world.host_ranks(self)) {
    if (rank == self) continue;
    const auto peer = notes_.identity(rank);
    if (peer.host != os::host_identity()) continue;  // the label of its host says otherwise: it can not be watched here
    const auto peer_started = peer.started ? std::optional(peer.started) : std::nullopt;
    local_.push_back({rank, os::ProcessWatch(static_cast<pid_t>(peer.process), peer_started)});
  }
  store->setTimeout(kStoreTimeout);
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
  changed_.wait_for(lock, kPatience + kSilence + 2 * kStoreTimeout, [&] { return state.verdict.has_value(); });
  return state.verdict.value_or(Verdict{Verdict::Kind::lost, {suspect}, symptom});
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
    {
      std::lock_guard lock(mutex_);
      if (ending_) return;
      for (const auto& [group, state] : cases_) groups.push_back(group);
    }
    for (auto* group : groups) examine(group);
  }
}

// Sleeps for one tick, or until a process of this host ends.
void Liveness::watch_processes() {
  std::vector<int> descriptors;
  for (const auto& peer : local_) descriptors.push_back(peer.watch.descriptor());
  os::wait_readable(descriptors, os::Deadline(kTick));
  std::vector<int> ended;
  for (const auto& peer : local_) {
    if (peer.watch.gone()) ended.push_back(peer.rank);
  }
  if (ended.empty()) return;
  local_.erase(std::remove_if(local_.begin(), local_.end(), [&](const auto& p) { return contains(ended, p.rank); }),
               local_.end());
  // A rank that ended after another one was lost has usually told so before: the store knows the order, and who left.
  next_beat_ = Clock::now();
  exchange_news();
  for (const int rank : ended) mark_lost(rank, "its process ended");
}

void Liveness::mark_lost(int rank, const std::string& how) {
  {
    std::lock_guard lock(mutex_);
    if (contains(lost_, rank) || contains(left_, rank) || leaving_) return;
    lost_.push_back(rank);
    lost_since_ = Clock::now();
  }
  log(LogLevel::warning, cat("rank ", rank, " is lost: ", how));
  ask_store([&] { notes_.report_lost(rank); });
}

// False: the store can not be asked (any more).
template <class Request>
bool Liveness::ask_store(const Request& request) {
  if (!store_works_) return false;
  const auto start = Clock::now();
  try {
    request();
    return true;
  } catch (const std::exception& failure) {
    store_works_ = false;
    const bool stopped = Clock::now() - start >= kStoreTimeout * 9 / 10;
    if (server_ >= 0 && server_ != world_.rank()) {
      server_silent_ = stopped;
      if (!stopped) mark_lost(server_, "the store that it serves is gone");
    }
    log(LogLevel::info, cat("the store does not answer: ", failure.what()));
    return false;
  }
}

void Liveness::exchange_news() {
  bool say_goodbye = false;
  {
    std::lock_guard lock(mutex_);
    say_goodbye = leaving_ && !has_left_;
    if (!say_goodbye && Clock::now() < next_beat_) return;
  }
  next_beat_ = Clock::now() + beat_;
  Notes::Gone news;
  const bool heard = ask_store([&] {
    if (say_goodbye) notes_.report_left(world_.rank());
    notes_.beat(world_.rank());
    news = notes_.gone();
  });
  std::lock_guard lock(mutex_);
  if (say_goodbye) has_left_ = true;
  if (heard) {
    const auto add_new = [](std::vector<int>& known, const std::vector<int>& told) {
      std::vector<int> merged = told;  // the store's order first, then what it does not know yet
      for (const int rank : known) {
        if (!contains(merged, rank)) merged.push_back(rank);
      }
      const bool grown = merged.size() > known.size();
      known = std::move(merged);
      return grown;
    };
    if (add_new(lost_, news.lost)) lost_since_ = Clock::now();
    add_new(left_, news.left);
  }
  changed_.notify_all();
}

std::vector<int> Liveness::gone_among(const std::vector<int>& members, const std::vector<int>& gone) const {
  std::vector<int> found;
  for (const int rank : gone) {
    if (rank != world_.rank() && contains(members, rank)) found.push_back(rank);
  }
  return found;
}

void Liveness::examine(Watched* group) {
  Case state;
  {
    std::lock_guard lock(mutex_);
    const auto found = cases_.find(group);
    if (found == cases_.end() || found->second.verdict) return;
    state = found->second;
    examined_ = group;
  }
  const auto verdict = decide(group, state, group->pending());
  if (verdict) group->abort(*verdict);
  std::lock_guard lock(mutex_);
  if (const auto found = cases_.find(group); found != cases_.end()) {
    found->second.reported = state.reported;
    found->second.next_look = state.next_look;
    found->second.verdict = verdict;
  }
  examined_ = nullptr;
  changed_.notify_all();
}

std::optional<Verdict> Liveness::decide(Watched* group, Case& state, const std::optional<Watched::Pending>& pending) {
  const auto now = Clock::now();
  const auto& members = group->watched_members();
  const bool asked = state.asked.has_value();
  std::vector<int> lost, left;
  Clock::time_point lost_since;
  {
    std::lock_guard lock(mutex_);
    if (leaving_ && pending && now - leaving_since_ >= kFarewell) {
      return Verdict{Verdict::Kind::timeout, {}, "this rank left the job while it waited"};
    }
    lost = gone_among(members, lost_);
    left = gone_among(members, left_);
    lost_since = lost_since_;
  }
  // Within the grace the operation may still complete, and news of an earlier loss may still come.
  if (!lost.empty()) {
    if (now - lost_since < kGrace && !asked) return std::nullopt;
    return Verdict{Verdict::Kind::lost, lost, "its process or its host is gone"};
  }
  const auto blocked = pending ? now - pending->since : Clock::duration::zero();
  if (!asked && (blocked < kSlow || now < state.next_look)) return std::nullopt;
  state.next_look = now + beat_;

  std::optional<Verdict> told;
  ask_store([&] { told = notes_.verdict(group->watched_name()); });
  if (told) return told;
  const auto deadline = group->watched_deadline();
  std::optional<std::vector<int>> silent;
  if (asked || (pending && blocked >= deadline - kObserve)) silent = silent_of(members);
  if (pending && blocked >= deadline) {
    if (!silent) return std::nullopt;
    return conclude(group, {Verdict::Kind::timeout, *silent, cat("the deadline of ", deadline.count(), " ms passed")});
  }
  if (pending && blocked >= kTellSlow) {
    if (auto mismatch = find_mismatch(group, state, *pending)) return conclude(group, std::move(*mismatch));
  }
  if (!asked) return std::nullopt;
  if (!left.empty()) return Verdict{Verdict::Kind::lost, left, "it left the job"};
  if (now - *state.asked < kPatience || !silent) return std::nullopt;
  if (contains(*silent, state.suspect)) mark_lost(state.suspect, "its connection broke and it is silent");
  return conclude(group, {Verdict::Kind::lost, {state.suspect}, state.symptom});
}

Verdict Liveness::conclude(Watched* group, Verdict verdict) {
  ask_store([&] { verdict = notes_.report_verdict(group->watched_name(), verdict); });
  return verdict;
}

// The members that are silent; nothing while it can not be told yet of one of them.
std::optional<std::vector<int>> Liveness::silent_of(const std::vector<int>& members) {
  const std::vector<int> others = gone_among(members, members);
  std::vector<int64_t> beats;
  if (!ask_store([&] { beats = notes_.beats(others); })) {
    return server_silent_ ? std::vector<int>{server_} : std::vector<int>{};
  }
  const auto now = Clock::now();
  const auto slack = 2 * beat_;
  std::vector<int> silent;
  bool unsure = false;
  for (size_t i = 0; i < others.size(); ++i) {
    auto& pulse = pulses_.try_emplace(others[i], Pulse{beats[i], now, now, {}}).first->second;
    if (pulse.beats != beats[i]) {
      if (now - pulse.sampled < kLively) pulse.alive = now;
      pulse.beats = beats[i];
      pulse.changed = now;
    }
    pulse.sampled = now;
    if (now - pulse.changed >= kSilence + slack) {
      silent.push_back(others[i]);
    } else if (now - pulse.alive >= kLively + slack) {
      unsure = true;
    }
  }
  if (unsure) return std::nullopt;
  return silent;
}

// If any two members are in different operations, one of the two differs from member 0: to compare with it is enough.
std::optional<Verdict> Liveness::find_mismatch(Watched* group, Case& state, const Watched::Pending& pending) {
  if (pending.sequence == 0 || Clock::now() - pending.since < kTellSlow) return std::nullopt;
  const int self = world_.rank();
  const std::string own = cat(pending.sequence, " ", pending.text);
  std::optional<Verdict> verdict;
  ask_store([&] {
    if (state.reported != own) notes_.report_slow(group->watched_name(), self, {pending.sequence, pending.text});
    state.reported = own;
    const int first = group->watched_members().front();
    if (first == self) return;
    const auto theirs = notes_.slow(group->watched_name(), first);
    if (!theirs || theirs->sequence != pending.sequence || theirs->text == pending.text) return;
    verdict = Verdict{Verdict::Kind::mismatch,
                      {},
                      cat("rank ", first, " called ", theirs->text, ", rank ", self, " called ", pending.text)};
  });
  return verdict;
}

}  // namespace tesserae::comm
