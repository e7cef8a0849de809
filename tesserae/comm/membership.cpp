// How a job goes on with a new process in place of one that was lost, or with another number of ranks:
//
//  1. The launcher serves the job's store, so that no rank's end takes it along, and counts epochs; ranks first meet in
//     epoch 0.
//  2. A rank whose operation failed says so, and for which ranks it had waited to its deadline: these may be stopped,
//     or hang, which the launcher does not see. It kills them. From then on they are like others that have ended:
//     whoever is replaced has no process any more that could write.
//  3. The launcher starts a process for each rank that has ended and tells it the next epoch. Then it announces that
//     epoch; or, if it does not replace any more, that there is none. Where the job may have fewer ranks, it announces
//     who is left instead, which gives them new numbers: they meet to ask for a number that the job can have (6).
//  4. The ranks that are left have waited for that, and meet the new ones (Fabric::reconnect). Keys of the store carry
//     the epoch: what is left of an earlier one meets nobody.
//  5. If all ranks say that they failed and none has ended, the launcher begins an epoch without replacing any.
//     A new process may have been there before, as a spare that has begun all that needs no place: it is told its place
//     and the epoch in 3.
//     (Of a job on several hosts, host_links.cpp says how its launchers do that together.)
//  6. Rank 0 may ask for another number of ranks. The launcher starts those that are missing, tells all with the next
//     epoch how many it has, and expects those that have no place in it to end. A loss at the same time is 3.
//  7. On several hosts the launcher may be lost itself. Where that of another host may take over (succession.cpp) ranks
//     that do not reach theirs look for its claim, and wait for the first epoch of the new one: of those left, as in 3.
//     They are known by a name of each process, since not all need have been in the same epoch. What they had told the
//     old one the new one knows, up to a beat ago: who tells what must not be lost remembers it, too
//     (train/recovery.cpp).

#include "tesserae/comm/membership.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string_view>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/open_store.h"
#include "tesserae/os/clock.h"

namespace tesserae::comm {
namespace {

constexpr const char* prefix = "membership";
constexpr const char* ends = "end";
constexpr std::string_view of_left = "left ", of_processes = "processes ";
constexpr const char *all_names = "remembered", *mandate_key = "mandate", *times_remembered = "times-remembered";
/// Epochs of a launcher that has taken over begin here, above all of those before.
constexpr int epochs_of_a_generation = 1 << 20;
constexpr std::chrono::milliseconds patient(300'000), to_reach(2000);

std::string of_epoch(const char* what, int epoch) {
  return cat(what, "/", epoch);
}

template <class Word>
std::string list(const std::vector<Word>& words) {
  std::string text;
  for (const Word& word : words) text += cat(text.empty() ? "" : " ", word);
  return text;
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

int epoch_before(int64_t generation) {
  return generation == 0 ? 0 : static_cast<int>(generation) * epochs_of_a_generation - 1;
}

std::string text_of(const Mandate& mandate) {
  return cat(mandate.job.empty() ? "-" : mandate.job, " ", mandate.generation, " ", mandate.host);
}

std::string value_of(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr ? value : "";
}

std::string key_of_spare(const std::string& number) {
  return "spare/" + number;
}

std::string name_of_remembered(const std::string& key) {
  return "remembered/" + key;
}

/// A key has no spaces. `is_new`: nobody here has told it before.
void remember_in(c10d::Store& store, const std::string& key, const std::string& value, bool is_new) {
  const std::string name = key + " ";
  if (is_new) store.append(all_names, {name.begin(), name.end()});
  store.set(name_of_remembered(key), value);
}

std::string value_of_remembered(c10d::Store& store, const std::string& key) {
  const std::string name = name_of_remembered(key);
  return store.check({name}) ? store.get_to_str(name) : "";
}

}  // namespace

MembershipServer::MembershipServer(uint16_t port, const Mandate& mandate, Serve to)
    : mandate_(mandate), epoch_(epoch_before(mandate.generation)) {
  try {
    const auto served = open_store("127.0.0.1", port, patient, to);
    port_ = served->getPort();
    served_ = served;
    store_ = c10::make_intrusive<c10d::PrefixStore>(prefix, served);
    store_->set(of_epoch("missing", epoch_), " ");
    store_->set(all_names, " ");
    store_->set(mandate_key, text_of(mandate));
  } catch (const std::exception& failure) {
    throw IoError("MembershipServer", cat("the store of the job cannot be served: ", reason_of(failure)));
  }
}

std::vector<MembershipServer::Missing> MembershipServer::missing() {
  std::istringstream told(store_->get_to_str(of_epoch("missing", epoch_)));
  std::vector<Missing> all;
  for (Missing each; told >> each.by >> each.rank;) all.push_back(each);
  return all;
}

int MembershipServer::failed() {
  return static_cast<int>(store_->add(of_epoch("failed", epoch_), 0));
}

std::optional<int> MembershipServer::asked_ranks() {
  const std::string key = of_epoch("ranks", epoch_);
  if (!store_->check({key})) return std::nullopt;
  return std::atoi(store_->get_to_str(key).c_str());
}

void MembershipServer::announce(const std::string& what) {
  store_->set(of_epoch("missing", epoch_ + 1), " ");
  store_->set(of_epoch("epoch", epoch_ + 1), what);
}

void MembershipServer::begin_epoch(int ranks) {
  announce(cat(ranks));
  ++epoch_;
}

void MembershipServer::begin_epoch_of(const std::vector<int>& left) {
  announce(cat(of_left, list(left)));
  ++epoch_;
}

void MembershipServer::begin_epoch_of(const std::vector<std::string>& processes) {
  announce(cat(of_processes, list(processes)));
  ++epoch_;
}

void MembershipServer::give_place(int64_t spare, int rank, int ranks) {
  comm::give_place(served_, spare, epoch_ + 1, rank, ranks);
}

void give_place(c10::intrusive_ptr<c10d::Store> store, int64_t spare, int epoch, int rank, int ranks) {
  c10d::PrefixStore(prefix, std::move(store)).set(key_of_spare(cat(spare)), cat(epoch, " ", rank, " ", ranks));
}

void MembershipServer::end() {
  announce(ends);
}

std::string MembershipServer::remembered(const std::string& key) {
  return value_of_remembered(*store_, key);
}

void MembershipServer::remember(const std::map<std::string, std::string>& told) {
  for (const auto& [key, value] : told) remember_in(*store_, key, value, told_.insert(key).second);
  store_->add(times_remembered, 1);
}

std::map<std::string, std::string> all_remembered(c10::intrusive_ptr<c10d::Store> store) {
  c10d::PrefixStore told(prefix, std::move(store));
  std::map<std::string, std::string> all;
  for (const std::string& key : words_of(told.get_to_str(all_names))) all[key] = value_of_remembered(told, key);
  return all;
}

int64_t count_remembered(c10::intrusive_ptr<c10d::Store> store) {
  return c10d::PrefixStore(prefix, std::move(store)).add(times_remembered, 0);
}

std::optional<Mandate> mandate_of(c10::intrusive_ptr<c10d::Store> store) {
  c10d::PrefixStore told(prefix, std::move(store));
  if (!told.check({mandate_key})) return std::nullopt;
  std::istringstream words(told.get_to_str(mandate_key));
  Mandate mandate;
  words >> mandate.job >> mandate.generation >> mandate.host;
  return mandate;
}

/// What `request` returns of the store; nothing: another launcher has taken over while it waited, or patience is over.
template <class Request>
auto Membership::ask(Request request, const os::Deadline* patience) {
  if (!succession_) return std::optional(request());
  if (!limiter_) limiter_ = std::make_unique<TimeLimiter>();
  const auto wanted = [&] { return !(patience != nullptr && patience->passed()) && !successor(); };
  return limiter_->call_while(wanted, std::move(request));
}

Membership::Membership(const mesh::Launch& launch, bool survives)
    : survives_(survives), ranks_(launch.size), rank_(launch.rank), address_(launch.address), port_(launch.port) {
  const char* const epoch = std::getenv(epoch_variable);
  if (epoch == nullptr) return;
  epoch_ = std::atoi(epoch);
  try {
    take_store(open_store(address_, port_, patient));
  } catch (const std::exception& failure) {
    throw IoError("Membership", cat("the launcher at ", address_, ":", port_, " is not reached: ", reason_of(failure)));
  }
  begin_succession();
  if (const char* const spare = std::getenv(spare_variable); spare != nullptr) wait_for_place(spare);
}

/// Where the launcher says that another one may take over. It has told its mandate as soon as it serves.
void Membership::begin_succession() {
  const std::string folder = value_of(succession_variable);
  if (folder.empty() || !survives_) return;
  for (const os::Deadline patience(std::chrono::seconds(10)); !patience.passed();) {
    if (const auto mandate = mandate_of(served_)) {
      mandate_ = *mandate;
      succession_.emplace(folder, mandate_.job);
      return;
    }
    os::sleep_for(std::chrono::milliseconds(20));
  }
  log(LogLevel::warning, "the launcher that decides does not say by which claim: none takes over if it is lost");
}

void Membership::take_store(c10::intrusive_ptr<c10d::Store> store) {
  served_ = std::move(store);
  store_ = c10::make_intrusive<c10d::PrefixStore>(prefix, served_);
  told_.clear();
}

void Membership::wait_for_place(const std::string& spare) {
  const std::string key = key_of_spare(spare);
  try {
    const auto read = [store = store_, key] { return store->check({key}) ? store->get_to_str(key) : ""; };
    std::string told;
    for (; told.empty(); os::sleep_for(std::chrono::milliseconds(10))) {
      const auto answer = ask(read, nullptr);
      if (!answer) throw IoError("Membership", "another launcher has taken over");
      told = *answer;
    }
    std::istringstream place(told);
    place >> epoch_ >> rank_ >> ranks_;
  } catch (const std::exception& failure) {
    throw IoError("Membership",
                  cat("the launcher has ended, and spare process ", spare, " was not needed: ", reason_of(failure)));
  }
}

/// The same, where a launcher that is lost is a loss like any other: the ranks are gone on with by its successor.
template <class Request>
auto Membership::require(Request request) {
  try {
    if (auto answer = ask(std::move(request), nullptr)) return *std::move(answer);
  } catch (const std::exception& failure) {
    if (!succession_) throw;
    log(LogLevel::warning, cat("the launcher is not reached: ", reason_of(failure)));
  }
  throw PeerLost("Membership", "the launcher is lost, and another one may take over", {});
}

bool Membership::next_epoch(const std::vector<int>& missing, std::chrono::milliseconds deadline) {
  if (!recovers()) return false;
  const os::Deadline patience(deadline_ = deadline);
  try {
    std::string told;
    for (const int rank : missing) told += cat(rank_, " ", rank, " ");
    const auto tell = [store = store_, epoch = epoch_, told] {
      if (!told.empty()) store->append(of_epoch("missing", epoch), {told.begin(), told.end()});
      return store->add(of_epoch("failed", epoch), 1);
    };
    if (!ask(tell, &patience)) return turn_to_successor("the launcher hears of no loss", patience);
  } catch (const std::exception& failure) {
    return turn_to_successor(cat("the launcher hears of no loss: ", reason_of(failure)), patience);
  }
  return wait_for_epoch(patience);
}

bool Membership::wait_for_epoch(std::chrono::milliseconds deadline) {
  return wait_for_epoch(os::Deadline(deadline_ = deadline));
}

bool Membership::wait_for_epoch(const os::Deadline& patience) {
  std::string told;
  try {
    const auto read = [store = store_, key = of_epoch("epoch", epoch_ + 1)] {
      return store->check({key}) ? store->get_to_str(key) : "";
    };
    for (int asked = 1; told.empty(); ++asked) {
      const auto answer = ask(read, &patience);
      // One that has taken over counts, also if the one before it answers still.
      if (!answer || (asked % 10 == 0 && successor())) {
        return turn_to_successor(cat("the launcher begins no epoch ", epoch_ + 1), patience);
      }
      told = *answer;
      if (!told.empty()) break;
      if (patience.passed()) return false;
      os::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (const std::exception& failure) {
    return turn_to_successor(cat("the launcher begins no epoch ", epoch_ + 1, ": ", reason_of(failure)), patience);
  }
  if (told == ends) return false;
  ++epoch_;
  return take_place(told);
}

/// What the launcher has announced of an epoch. False: the others go on without this process, which they do not know.
bool Membership::take_place(const std::string& told) {
  const bool anew = told.starts_with(of_processes);
  of_those_left_ = anew || told.starts_with(of_left);
  if (!of_those_left_) {
    ranks_ = std::atoi(told.c_str());
    return true;
  }
  const std::vector<std::string> left = words_of(told.substr((anew ? of_processes : of_left).size()));
  const std::string own = anew ? value_of(process_variable) : std::to_string(rank_);
  rank_ = static_cast<int>(std::ranges::find(left, own) - left.begin());
  ranks_ = static_cast<int>(left.size());
  return !anew || has_place();
}

// 7.

/// Nothing, too, where storage is not reached.
std::optional<Claim> Membership::successor() const {
  try {
    std::optional<Claim> claim = succession_ ? succession_->newest() : std::nullopt;
    return claim && is_successor(*claim) ? std::move(claim) : std::nullopt;
  } catch (const IoError&) {
    return std::nullopt;
  }
}

bool Membership::is_successor(const Claim& claim) const {
  return !claim.status && claim.generation > mandate_.generation && claim.host != mandate_.host;
}

bool Membership::turn_to_successor(const std::string& reason, const os::Deadline& patience) {
  if (!succession_) {
    log(LogLevel::warning, reason);
    return false;
  }
  for (; !patience.passed(); os::sleep_for(std::chrono::milliseconds(50))) {
    try {
      const std::optional<Claim> newest = succession_->newest();
      if (newest && newest->status) return false;  // the job is over
      // It waits for other hosts as long as for this one.
      if (newest && is_successor(*newest) && follow(*newest)) return wait_for_epoch(os::Deadline(deadline_));
    } catch (const std::exception&) {  // storage, or that launcher, is not reached now
    }
  }
  log(LogLevel::warning, cat(reason, "; no other launcher has taken over"));
  return false;
}

/// False: it is not there now. Throws what comes of reaching for it.
bool Membership::follow(const Claim& claim) {
  limiter_ = std::make_unique<TimeLimiter>();  // the one before may wait for the other launcher for ever
  const auto reach = [address = claim.address, port = claim.port] {
    const auto store = open_store(address, port, to_reach);
    store->setTimeout(patient);
    return std::pair(store, mandate_of(store));
  };
  const auto found = limiter_->call(reach, 2 * to_reach);
  if (!found) return false;
  // It may have claimed again since. If it is another one, somebody else serves there now.
  const auto& [store, told] = *found;
  if (!told || told->job != mandate_.job || told->host != claim.host || told->generation <= mandate_.generation) {
    return false;
  }
  address_ = claim.address;
  port_ = claim.port;
  take_store(store);
  mandate_ = *told;
  epoch_ = epoch_before(mandate_.generation);
  return true;
}

void Membership::ask_for_ranks(int ranks) {
  require([store = store_, key = of_epoch("ranks", epoch_), ranks] { return store->set(key, cat(ranks)), true; });
}

void Membership::remember(const std::string& key, const std::string& value) {
  if (store_ == nullptr) return;
  const bool is_new = told_.insert(key).second;
  require([store = store_, key, value, is_new, counts = succession_.has_value()] {
    remember_in(*store, key, value, is_new);
    return !counts || store->add(times_remembered, 1) > 0;  // which waits for an answer, as the other does not
  });
}

std::string Membership::remembered(const std::string& key) {
  if (store_ == nullptr) return "";
  return require([store = store_, key] { return value_of_remembered(*store, key); });
}

bool Membership::is_over() {
  if (store_ == nullptr) return false;
  const auto check = [store = store_, key = of_epoch("epoch", epoch_ + 1)] { return store->check({key}); };
  return ask(check, nullptr).value_or(true);
}

mesh::World Membership::world() const {
  const std::string size = std::to_string(ranks_), rank = std::to_string(rank_), port = std::to_string(port_);
  return mesh::World::from_environment([&](const char* name) -> const char* {
    const std::string_view asked = name;
    if (asked == "RANK" || asked == "LOCAL_RANK") return rank.c_str();
    if (served() && asked == "MASTER_ADDR") return address_.c_str();
    if (served() && asked == "MASTER_PORT") return port.c_str();
    return asked == "WORLD_SIZE" || asked == "LOCAL_WORLD_SIZE" ? size.c_str() : std::getenv(name);
  });
}

}  // namespace tesserae::comm
