#include "tesserae/comm/liveness/liveness_store.h"

#include <algorithm>
#include <sstream>

#include "tesserae/base/error.h"

namespace tesserae::comm {

namespace {

std::string text_of(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

constexpr int given_up = -1;  // among those that left

// Ranks separated by blanks, each kept at its first place: two ranks may report the same.
std::vector<int> parse_ranks(const std::string& text) {
  std::istringstream in(text);
  std::vector<int> ranks;
  for (int rank = 0; in >> rank;) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  }
  return ranks;
}

Verdict parse_verdict(const std::string& text) {
  std::istringstream in(text);
  int kind = 0;
  size_t count = 0;
  in >> kind >> count;
  Verdict verdict{static_cast<Verdict::Kind>(kind), std::vector<int>(count), {}};
  for (int& rank : verdict.ranks) in >> rank;
  in >> std::ws;
  std::getline(in, verdict.text);
  return verdict;
}

}  // namespace

LivenessStore::LivenessStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

void LivenessStore::introduce(int rank, const Identity& identity) {
  store_->set(cat("identity/", rank), cat(identity.process, " ", identity.started, " ", identity.host));
}

LivenessStore::Identity LivenessStore::identity(int rank) {
  std::istringstream in(store_->get_to_str(cat("identity/", rank)));
  Identity identity;
  in >> identity.process >> identity.started >> std::ws;
  std::getline(in, identity.host);
  return identity;
}

void LivenessStore::beat(int rank) {
  store_->add(cat("beat/", rank), 1);
}

std::vector<int64_t> LivenessStore::beats(const std::vector<int>& ranks) {
  std::vector<int64_t> counts;
  for (const int rank : ranks) counts.push_back(store_->add(cat("beat/", rank), 0));
  return counts;
}

void LivenessStore::open() {
  store_->set("lost", " ");
  store_->set("left", " ");
}

void LivenessStore::report_lost(int rank) {
  store_->append("lost", bytes_of(cat(rank, " ")));
}

void LivenessStore::report_left(int rank, bool gives_up) {
  store_->append("left", bytes_of(gives_up ? cat(rank, " ", given_up, " ") : cat(rank, " ")));
}

LivenessStore::Gone LivenessStore::gone() {
  Gone gone{parse_ranks(store_->get_to_str("lost")), parse_ranks(store_->get_to_str("left"))};
  gone.given_up = std::erase(gone.left, given_up) > 0;
  return gone;
}

std::optional<std::string> LivenessStore::find(const std::string& key) {
  if (!store_->check({key})) return std::nullopt;
  return text_of(store_->get(key));
}

void LivenessStore::report_slow(const std::string& group, int rank, const Slow& operation) {
  store_->set(cat("slow/", group, "/", rank), cat(operation.sequence, " ", operation.text));
}

std::optional<LivenessStore::Slow> LivenessStore::slow(const std::string& group, int rank) {
  const auto found = find(cat("slow/", group, "/", rank));
  if (!found) return std::nullopt;
  std::istringstream in(*found);
  Slow operation;
  in >> operation.sequence >> std::ws;
  std::getline(in, operation.text);
  return operation;
}

void LivenessStore::report_waiting(int rank, bool waits) {
  store_->set(cat("waits/", rank), waits ? "1" : "0");
}

std::vector<int> LivenessStore::not_waiting(const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(cat("waits/", rank));
  if (!store_->check(keys)) return {};
  const auto told = store_->multiGet(keys);
  std::vector<int> found;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (text_of(told[i]) == "0") found.push_back(ranks[i]);
  }
  return found;
}

Verdict LivenessStore::report_verdict(const std::string& group, const Verdict& verdict) {
  std::string text = cat(static_cast<int>(verdict.kind), " ", verdict.ranks.size());
  for (const int rank : verdict.ranks) text += cat(" ", rank);
  return parse_verdict(store_->compareSet(cat("verdict/", group), std::string(), text + " " + verdict.text));
}

std::optional<Verdict> LivenessStore::verdict(const std::string& group) {
  const auto found = find(cat("verdict/", group));
  return found ? std::optional(parse_verdict(*found)) : std::nullopt;
}

}  // namespace tesserae::comm
