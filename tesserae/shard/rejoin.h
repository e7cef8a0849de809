#pragma once

#include <vector>

#include "tesserae/shard/sharded_unit.h"

namespace tesserae::shard {

class Engine;

/// After a rank was lost, and the ranks that are left have met a new one in its place (Fabric::reconnect): the engines
/// of the others go on over new groups, with the masters and the state that they hold, and the new rank gets those of
/// the lost one from a replica. Degrees stay, and no values change. rejoin.cpp opens with the protocol.
///
/// Collective over the job, between steps or after one that threw a comm::CommError; from the thread that trains. A
/// failure (another rank is lost) leaves every value where it was: a rank rejoins again.
class Rejoin {
 public:
  explicit Rejoin(Engine& engine) : engine_(engine) {}

  /// On the ranks that are left: what a new rank does while it builds its engine.
  void connect();

  /// `whole`, by job rank and the same on all: who has its values, and who is new. True if each new rank shares every
  /// chunk of its own with a rank that has it. With `keeps_own` chunks that nobody shares do not count: those who are
  /// not whole have their own of these. Collective.
  bool can_fill(const std::vector<bool>& whole, bool keeps_own = false);
  /// Fills masters, and what companions keep, of new ranks; the next forward sees them. Companions keep the same kinds
  /// of state on all ranks. Collective; only if can_fill(). Returns the bytes that this rank sent.
  uint64_t fill(const std::vector<bool>& whole);

 private:
  void forget_step();
  void reconnect(FlatBuffer& buffer);

  Engine& engine_;
};

}  // namespace tesserae::shard
