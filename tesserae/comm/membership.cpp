// How a job goes on with a new process in place of one that was lost, or with another number of ranks:
//
//  1. The launcher serves the job's store, so that no rank's end takes it along, and counts epochs; ranks first meet in
//     epoch 0.
//  2. A rank whose operation failed says so, and of which ranks nothing was heard: these may be stopped, which the
//     launcher does not see. It kills them. From then on they are like others that have ended: whoever is replaced has
//     no process any more that could write.
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

#include "tesserae/comm/membership.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string_view>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/comm/error.h"
#include "tesserae/os/clock.h"

namespace tesserae::comm {
namespace {

constexpr const char* prefix = "membership";
constexpr const char* ends = "end";
constexpr std::string_view of_left = "left ";

std::string of_epoch(const char* what, int epoch) {
  return cat(what, "/", epoch);
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += cat(text.empty() ? "" : " ", rank);
  return text;
}

std::vector<int> numbers(const std::string& text) {
  std::vector<int> ranks;
  std::istringstream words(text);
  for (int rank = 0; words >> rank;) ranks.push_back(rank);
  return ranks;
}

std::string key_of_spare(const std::string& number) {
  return "spare/" + number;
}

std::string name_of_remembered(const std::string& key) {
  return "remembered/" + key;
}

std::string value_of_remembered(c10d::Store& store, const std::string& key) {
  const std::string name = name_of_remembered(key);
  return store.check({name}) ? store.get_to_str(name) : "";
}

}  // namespace

MembershipServer::MembershipServer(uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = true;
  options.waitWorkers = false;
  try {
    const auto served = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    port_ = served->getPort();
    served_ = served;
    store_ = c10::make_intrusive<c10d::PrefixStore>(prefix, served);
    store_->set(of_epoch("silent", epoch_), " ");
  } catch (const std::exception& failure) {
    throw IoError("MembershipServer", cat("the store of the job cannot be served: ", reason_of(failure)));
  }
}

std::vector<MembershipServer::Silence> MembershipServer::silent() {
  std::istringstream told(store_->get_to_str(of_epoch("silent", epoch_)));
  std::vector<Silence> silences;
  for (Silence silence; told >> silence.by >> silence.rank;) silences.push_back(silence);
  return silences;
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
  store_->set(of_epoch("silent", epoch_ + 1), " ");
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

Membership::Membership(const mesh::Launch& launch, bool survives)
    : survives_(survives), ranks_(launch.size), rank_(launch.rank) {
  const char* const epoch = std::getenv(epoch_variable);
  if (epoch == nullptr) return;
  epoch_ = std::atoi(epoch);
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = false;
  options.waitWorkers = false;
  try {
    store_ =
        c10::make_intrusive<c10d::PrefixStore>(prefix, c10::make_intrusive<c10d::TCPStore>(launch.address, options));
  } catch (const std::exception& failure) {
    throw IoError("Membership",
                  cat("the launcher at ", launch.address, ":", launch.port, " is not reached: ", reason_of(failure)));
  }
  if (const char* const spare = std::getenv(spare_variable); spare != nullptr) wait_for_place(spare);
}

void Membership::wait_for_place(const std::string& spare) {
  const std::string key = key_of_spare(spare);
  try {
    while (!store_->check({key})) os::sleep_for(std::chrono::milliseconds(10));
    std::istringstream place(store_->get_to_str(key));
    place >> epoch_ >> rank_ >> ranks_;
  } catch (const std::exception& failure) {
    throw IoError("Membership",
                  cat("the launcher has ended, and spare process ", spare, " was not needed: ", reason_of(failure)));
  }
}

bool Membership::next_epoch(const std::vector<int>& silent, std::chrono::milliseconds deadline) {
  if (!recovers()) return false;
  try {
    std::string told;
    for (const int rank : silent) told += cat(rank_, " ", rank, " ");
    if (!told.empty()) store_->append(of_epoch("silent", epoch_), {told.begin(), told.end()});
    store_->add(of_epoch("failed", epoch_), 1);
  } catch (const std::exception& failure) {
    log(LogLevel::warning, cat("the launcher hears of no loss: ", reason_of(failure)));
    return false;
  }
  return wait_for_epoch(deadline);
}

bool Membership::wait_for_epoch(std::chrono::milliseconds deadline) {
  const os::Deadline patience(deadline);
  std::string told;
  try {
    while (!is_over()) {
      if (patience.passed()) return false;
      os::sleep_for(std::chrono::milliseconds(5));
    }
    told = store_->get_to_str(of_epoch("epoch", epoch_ + 1));
  } catch (const std::exception& failure) {
    log(LogLevel::warning, cat("the launcher begins no epoch ", epoch_ + 1, ": ", reason_of(failure)));
    return false;
  }
  if (told == ends) return false;
  ++epoch_;
  of_those_left_ = told.starts_with(of_left);
  if (!of_those_left_) {
    ranks_ = std::atoi(told.c_str());
    return true;
  }
  const std::vector<int> left = numbers(told.substr(of_left.size()));
  rank_ = static_cast<int>(std::ranges::find(left, rank_) - left.begin());
  ranks_ = static_cast<int>(left.size());
  return true;
}

void Membership::ask_for_ranks(int ranks) {
  store_->set(of_epoch("ranks", epoch_), cat(ranks));
}

void Membership::remember(const std::string& key, const std::string& value) {
  if (store_ != nullptr) store_->set(name_of_remembered(key), value);
}

std::string Membership::remembered(const std::string& key) {
  return store_ != nullptr ? value_of_remembered(*store_, key) : "";
}

bool Membership::is_over() {
  return store_ != nullptr && store_->check({of_epoch("epoch", epoch_ + 1)});
}

mesh::World world_of_size(int ranks, int rank) {
  return mesh::World::from_environment(
      [size = std::to_string(ranks), rank = std::to_string(rank)](const char* name) -> const char* {
        const std::string_view asked = name;
        if (asked == "RANK" || asked == "LOCAL_RANK") return rank.c_str();
        return asked == "WORLD_SIZE" || asked == "LOCAL_WORLD_SIZE" ? size.c_str() : std::getenv(name);
      });
}

}  // namespace tesserae::comm
