// How another host's launcher comes to decide when the first one's is lost:
//
//  1. The launcher with which the job begins makes the first claim. Who does not find it does not see the same folder,
//     and takes over nothing.
//  2. Before a launcher that decides goes on without another host, it makes the next claim, which says so. If another
//     one has that claim, this one's time is over: its ranks are killed.
//  3. A launcher that hears nothing of the one that decides looks for a newer claim. There is one of another host: it
//     follows that one, with its ranks. There is one of the same that goes on without this host: its ranks are killed.
//     There is none: it serves a store, and makes the next claim. If that is granted it decides.
//  4. It waits for the hosts of which it does not know that they are gone, and goes on with those that come, which is
//     2 for the others.
//  5. The end of the job, too, is a claim. Once all hosts have heard of it all claims are removed, the oldest first: so
//     who was given up, and comes back to claim what was claimed, finds the claim before it gone. Else they stay.
//
// So whatever is cut off from what, at most one side goes on, and which one is decided where all can see it. Storage
// that is not reached decides nothing: neither side goes on until it is.

#include "tesserae/comm/succession.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/os/random_name.h"

namespace tesserae::comm {
namespace {

constexpr const char* goes_on = "-";

std::string text_of(const Claim& claim) {
  std::string text = cat(claim.host, " ", claim.address, " ", claim.port, " ",
                         claim.status ? std::to_string(*claim.status) : std::string(goes_on));
  for (const int host : claim.without) text += cat(" ", host);
  return text + "\n";
}

Claim claim_from(int64_t generation, const std::string& text) {
  Claim claim{.generation = generation};
  std::string status;
  std::istringstream words(text);
  words >> claim.host >> claim.address >> claim.port >> status;
  if (!words) throw IoError("Succession", cat("claim ", generation, " of this job cannot be read: '", text, "'"));
  if (status != goes_on) claim.status = std::atoi(status.c_str());
  for (int host = 0; words >> host;) claim.without.push_back(host);
  return claim;
}

/// Of a name that begins with the prefix; drafts have none.
std::optional<int64_t> generation_of(std::string_view rest) {
  int64_t generation = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), generation);
  return error == std::errc() && end == rest.data() + rest.size() ? std::optional(generation) : std::nullopt;
}

void remove_quietly(const os::Path& path) {
  try {
    os::files().remove(path);
  } catch (const IoError&) {
  }
}

}  // namespace

Succession::Succession(os::Path folder, std::string job)
    : folder_(std::move(folder)), prefix_(cat("tesserae-job-", job, ".")) {}

os::Path Succession::path_of(int64_t generation) const {
  return folder_ / cat(prefix_, generation);
}

std::optional<Claim> Succession::newest() const {
  os::Files& files = os::files();
  const std::vector<int64_t> all = generations();
  // A list may be that of a moment ago, on storage of several hosts.
  int64_t generation = all.empty() ? 0 : all.back();
  if (all.empty() && !files.exists(path_of(0))) return std::nullopt;
  while (files.exists(path_of(generation + 1))) ++generation;
  return claim_from(generation, files.read(path_of(generation)));
}

bool Succession::claim(const Claim& claim) const {
  if (claim.generation >= generations_of_a_job) {
    throw IoError("Succession",
                  cat("hosts of this job were lost ", claim.generation, " times, which is all that it can"));
  }
  const os::Path name = path_of(claim.generation);
  const std::string text = text_of(claim);
  // An answer may have been lost: then the link is there, and is this one's.
  const bool granted = link(text, name) || os::files().read(name) == text;
  if (granted && claim.generation > 0 && !os::files().exists(path_of(claim.generation - 1))) {
    os::files().remove(name);  // clear() has been there meanwhile
    return false;
  }
  os::files().sync_directory(folder_);
  return granted;
}

/// The name comes with all that it says, and to one: on storage of several hosts, too, that is what a link is.
bool Succession::link(const std::string& text, const os::Path& name) const {
  os::Files& files = os::files();
  const os::Path draft = folder_ / cat(prefix_, "draft-", os::random_name());
  try {
    files.write_synced(draft, text);
    const bool granted = files.link(draft, name);
    files.remove(draft);
    return granted;
  } catch (const IoError&) {
    remove_quietly(draft);
    throw;
  }
}

std::vector<int64_t> Succession::generations() const {
  std::vector<int64_t> all;
  for (const std::string& name : os::files().list(folder_)) {
    if (!name.starts_with(prefix_)) continue;
    const auto generation = generation_of(std::string_view(name).substr(prefix_.size()));
    if (generation) all.push_back(*generation);
  }
  std::ranges::sort(all);
  return all;
}

void Succession::clear() const noexcept {
  try {
    for (const int64_t generation : generations()) os::files().remove(path_of(generation));
    for (const std::string& name : os::files().list(folder_)) {
      if (name.starts_with(prefix_)) os::files().remove(folder_ / name);  // what was being claimed
    }
  } catch (const IoError&) {  // a few small files stay
  }
}

}  // namespace tesserae::comm
