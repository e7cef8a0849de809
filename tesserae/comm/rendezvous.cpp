#include "tesserae/comm/rendezvous.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>

#include "tesserae/comm/error.h"
#include "tesserae/comm/liveness/liveness.h"
#include "tesserae/comm/liveness/watched_store.h"
#include "tesserae/comm/open_store.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/local_socket.h"

namespace tesserae::comm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kStayAfterFailure{1500};
constexpr milliseconds kFirstPause{5}, kLongestPause{100};
// A busy store may take so long, also once the deadline has passed and one looks who has come.
constexpr milliseconds kAnswer{2000};

std::string below(int epoch) {
  return epoch == 0 ? "" : cat("epoch-", epoch, "/");
}

/// torchrun may start all ranks again on a store that it serves: what those before left there is not of these. A store
/// that a rank serves ends with its start, and each host's torchrun counts its own failures only.
std::string of_this_start(const mesh::World& world) {
  const char* const restart = world.launch().store_is_served ? std::getenv("TORCHELASTIC_RESTART_COUNT") : nullptr;
  return cat(restart != nullptr ? restart : "0", "/");
}

}  // namespace

Rendezvous::Rendezvous(const mesh::World& world, milliseconds deadline, int epoch)
    : world_(world), deadline_(deadline), start_(Clock::now()) {
  job_ = cat("tesserae/", of_this_start(world), below(epoch));
  const auto& launch = world.launch();
  if (launch.port == 0) {
    throw InvalidArgument("Fabric::connect", cat(launch.size,
                                                 " ranks need a rendezvous: set MASTER_PORT (the same for "
                                                 "all ranks) and MASTER_ADDR"));
  }
  serves_ = launch.rank == 0 && !launch.store_is_served;
  store_ = connect(serves_ && epoch == 0, deadline_);  // that of the first meeting serves the later ones
}

Rendezvous::Rendezvous(const mesh::World& world, c10::intrusive_ptr<c10d::Store> store, milliseconds deadline,
                       int epoch)
    : world_(world),
      deadline_(deadline),
      start_(Clock::now()),
      serves_(world.launch().rank == 0 && !world.launch().store_is_served),
      joined_(true),
      job_(cat(of_this_start(world), below(epoch))),
      store_(std::move(store)) {}

c10::intrusive_ptr<c10d::Store> Rendezvous::connect(bool serve, milliseconds patience) const {
  const auto& launch = world_.launch();
  const std::string where = cat("the store at ", launch.address, ":", launch.port);
  try {
    if (serve) {
      const bool alone = launch.address == "127.0.0.1" && launch.local_size == launch.size;
      return open_store(launch.address, launch.port, patience, alone ? Serve::this_host : Serve::network);
    }
    // A process that is stopped takes connections, and answers nothing.
    TimeLimiter limiter;
    const auto open = [address = launch.address, port = launch.port, patience] {
      return open_store(address, port, patience);
    };
    if (auto store = limiter.call(open, patience + kAnswer)) return *store;
    throw std::runtime_error("it does not answer");
  } catch (const os::AddressInUse&) {
    throw CommError("Fabric::connect", cat(where, " cannot be served: the port is in use; set another MASTER_PORT"));
  } catch (const std::exception& failure) {
    if (serve) throw CommError("Fabric::connect", cat(where, " cannot be served: ", reason_of(failure)));
    throw Timeout("Fabric::connect",
                  cat(where, " was not reached within ", deadline_.count(), " ms; it is served by ", server_name(),
                      ": ", reason_of(failure)),
                  server());
  }
}

c10::intrusive_ptr<c10d::Store> Rendezvous::store(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(job_ + prefix, store_);
}

c10::intrusive_ptr<c10d::Store> Rendezvous::own_connection(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(job_ + prefix,
                                                joined_ ? store_->clone() : connect(/*serve=*/false, deadline_));
}

// The process that serves the store may be stopped: then no question is answered, also none with a limit of its own.
template <class Request>
auto Rendezvous::ask(Request request) const {
  const auto used = std::chrono::duration_cast<milliseconds>(Clock::now() - start_);
  if (auto answer = limiter_->call(std::move(request), std::max(deadline_ - used, milliseconds(0)) + kAnswer)) {
    return *answer;
  }
  throw Timeout(
      "Fabric::connect",
      cat("the store of the job did not answer within ", deadline_.count(), " ms; it is served by ", server_name()),
      server());
}

std::string Rendezvous::server_name() const {
  return world_.launch().store_is_served ? "the launcher" : "launcher rank 0";
}

std::vector<int> Rendezvous::server() const {
  return world_.launch().store_is_served ? std::vector<int>{} : std::vector<int>{0};
}

void Rendezvous::introduce(const c10::intrusive_ptr<c10d::Store>& signs_of_life) const {
  try {
    ask([rank = world_.launch().rank, signs_of_life] { return Liveness::introduce(rank, signs_of_life), true; });
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& failure) {
    throw PeerLost("Fabric::connect", cat("the store was lost while the ranks met: ", reason_of(failure)), server());
  }
}

// Asks again and again, instead of waiting with a limit: torch warns of each limit that passes, with names of addresses
// that a name server may take ten seconds not to find, and keeps the connection from others meanwhile; and somebody may
// have to be told that nobody comes. A watched store asks itself, and tells who is lost.
bool Rendezvous::wait_for_all(const c10::intrusive_ptr<c10d::Store>& store,
                              const std::function<bool()>& cancelled) const {
  const auto used = [this] { return std::chrono::duration_cast<milliseconds>(Clock::now() - start_); };
  const bool waits = !cancelled && is_watched(store);
  for (int next = 0;;) {
    const bool has_come = ask([store, waits, key = std::to_string(next), left = deadline_ - used()] {
      try {
        if (waits) store->wait({key}, std::max(left, kFirstPause));
      } catch (const Timeout&) {
        return false;
      }
      return store->check({key});
    });
    if (has_come) ++next;
    // Also once all have come: some of them may have left again.
    const bool all = next == world_.size();
    if ((all || !has_come) && cancelled && cancelled()) {
      throw CommError("Fabric::connect", "another rank was lost while the ranks met");
    }
    if (all) return true;
    if (has_come) continue;
    if (used() >= deadline_) return false;
    os::sleep_for(std::clamp(used() / 20, kFirstPause, kLongestPause));
  }
}

std::vector<int> Rendezvous::absent(const c10::intrusive_ptr<c10d::Store>& store) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (!ask([store, key = std::to_string(rank)] { return store->check({key}); })) ranks.push_back(rank);
  }
  return ranks;
}

mesh::World Rendezvous::meet(const std::string& host, const std::function<bool()>& cancelled) {
  const auto hosts = store("host");
  std::vector<std::string> host_of;
  std::vector<int> missing;
  try {
    ask([hosts, own = std::to_string(world_.launch().rank), host] { return hosts->set(own, host), true; });
    if (!wait_for_all(hosts, cancelled)) missing = absent(hosts);
    for (int rank = 0; missing.empty() && rank < world_.size(); ++rank) {
      host_of.push_back(ask([hosts, key = std::to_string(rank)] { return hosts->get_to_str(key); }));
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& failure) {
    throw PeerLost("Fabric::connect", cat("the store was lost while the ranks met: ", reason_of(failure)), server());
  }
  if (!missing.empty()) {
    // The others' deadlines pass at about the same time, and they need the store to see who is missing.
    if (serves_) os::sleep_for(kStayAfterFailure);
    std::string list;
    for (const int rank : missing) list += (list.empty() ? "" : ", ") + std::to_string(rank);
    throw Timeout(
        "Fabric::connect",
        cat("launcher ranks ", list, " of ", world_.size(), " did not come within ", deadline_.count(), " ms"),
        missing);
  }
  limiter_.reset();
  return world_.with_hosts(host_of);
}

}  // namespace tesserae::comm
