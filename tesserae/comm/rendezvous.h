#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/liveness/time_limiter.h"
#include "tesserae/mesh/world.h"

namespace tesserae::comm {

/// How the processes of a job find each other: a key-value store at `world.launch()`'s address, served by launcher rank
/// 0 unless the launcher serves one itself (torchrun's agent), or a store that somebody else made.
class Rendezvous {
 public:
  /// Reaches the store. Ranks that name different epochs do not meet. Throws Timeout naming launcher rank 0 if nobody
  /// serves it by the deadline.
  Rendezvous(const mesh::World& world, std::chrono::milliseconds deadline, int epoch = 0);

  /// Uses a store that the ranks of `world` share already, and that others use below prefixes of their own.
  Rendezvous(const mesh::World& world, c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds deadline,
             int epoch = 0);

  /// Liveness::introduce of this rank; before meet().
  void introduce(const c10::intrusive_ptr<c10d::Store>& signs_of_life) const;
  /// Tells the others on which host this rank is, waits until all have come, and orders the ranks by host. Throws
  /// Timeout naming those (by launcher rank: no other is known yet) that have not come by the deadline, or launcher
  /// rank 0 if it serves a store that does not answer. Once. `cancelled` may be empty; see FabricOptions.
  mesh::World meet(const std::string& host, const std::function<bool()>& cancelled = {});

  const mesh::World& world() const { return world_; }  ///< as the launcher has it

  /// The store, restricted to keys below `prefix`. One connection for all: one request at a time.
  c10::intrusive_ptr<c10d::Store> store(const std::string& prefix) const;
  /// The same through a connection of its own.
  c10::intrusive_ptr<c10d::Store> own_connection(const std::string& prefix) const;

 private:
  c10::intrusive_ptr<c10d::Store> connect(bool serve, std::chrono::milliseconds patience) const;
  /// Whether all came by the deadline.
  bool wait_for_all(const c10::intrusive_ptr<c10d::Store>& store, const std::function<bool()>& cancelled) const;
  std::vector<int> absent(const c10::intrusive_ptr<c10d::Store>& store) const;
  std::vector<int> server() const;  ///< none if the launcher serves the store
  std::string server_name() const;
  template <class Request>
  auto ask(Request request) const;

  mesh::World world_;
  std::chrono::milliseconds deadline_;
  std::chrono::steady_clock::time_point start_;
  bool serves_ = false;
  bool joined_ = false;  ///< the store is somebody else's
  std::string job_;      ///< prefix of all keys: an agent's store outlives the restarts of a job
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<TimeLimiter> limiter_ = std::make_shared<TimeLimiter>();  // until the ranks have met
};

}  // namespace tesserae::comm
