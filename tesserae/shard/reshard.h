#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tesserae/shard/resharding.h"
#include "tesserae/shard/setting.h"
#include "tesserae/shard/sharded_unit.h"

namespace tesserae::shard {

class Engine;

/// One turn of the dial: afterwards the training state of an engine is sharded by other degrees, in all units, and lies
/// on other tiers. Values stay what they are, to the bit: masters, gradients, frozen parameters and what companions
/// keep move to their new owners and tiers, straight from ranks that have them and no more than is lacking; gathered
/// copies and the pool are made anew. Lifetimes stay; one that never freed because P was 1 frees after forward and
/// after backward now, and so does every unit while its parameters are on a disk. reshard.cpp opens with the protocol.
///
/// Between steps, also in the middle of an accumulation: what was accumulated inside no_sync is then brought to its
/// owners first. Collective over the job.
class Reshard {
 public:
  /// `disk`: this rank's, where tiers are the disk that were not; null: the one that the engine has.
  Reshard(Engine& engine, const Setting& setting, std::shared_ptr<offload::Disk> disk = nullptr);

  /// Once. Throws, with degrees and values as they were (what was accumulated may be with its owners): InvalidArgument
  /// for impossible degrees or tiers, inside a backward, or with a hook in place of a reduction that cannot stand for
  /// them; comm::Mismatch if ranks ask for different settings or hold different state; OutOfMemory on all ranks if one
  /// host, device or disk cannot hold what it would get. What is thrown once state moves (a lost peer, or memory that
  /// could not be allocated after all; steps 5 to 7 of reshard.cpp) leaves the model between two layouts: every later
  /// step throws, and the job goes on from its last checkpoint.
  Resharding run();

 private:
  static constexpr const char* name = "reshard";

  void require_agreement() const;
  void require_possible() const;
  std::vector<bool> gradients_of_all() const;
  std::vector<std::shared_ptr<const Sharding>> next_shardings() const;
  void require_memory() const;
  UnitContext next_context(const ShardedUnit& unit) const;
  double pool_bytes() const;
  void require_room(c10::Device place, double mine) const;
  void require_disk(double bytes) const;
  struct Bytes {
    double memory = 0;  ///< where the state lies
    double pieces = 0;  ///< on the accelerator, which gathers from there, though the state has left it
    double disk = 0;
    double largest_paged = 0;  ///< of one tensor
  };
  Bytes bytes_of(const FlatBuffer& buffer, const Flat& flat, const Sharding& sharding, bool has_gradient) const;
  uint64_t recut(FlatBuffer& buffer, bool has_gradient);
  void require_all(const std::string& failure, const std::string& what) const;

  Engine& engine_;
  Setting setting_;
  std::shared_ptr<offload::Disk> disk_;
  bool prepared_;                                      // shared copies and a pool were there, and will be again
  std::vector<bool> has_gradient_;                     // by flat buffer: some rank has one
  std::vector<std::shared_ptr<const Sharding>> next_;  // by unit
};

}  // namespace tesserae::shard
