#pragma once

#include <string>
#include <vector>

namespace tesserae::shard {

class Engine;

/// What a comparison of replicas found. The same on all ranks.
struct ReplicaReport {
  /// Job ranks, ascending, whose bytes are not those that most of the ranks hold which should have the same; where no
  /// bytes have a majority, all of these ranks. Empty: all replicas agree.
  std::vector<int> suspects;
  bool here = false;    ///< this rank is one of them: the only member in which ranks differ
  bool decided = true;  ///< false: some chunk has no bytes that more than half of its ranks hold
  std::string text;     ///< "rank 2: blocks.0.first and 3 more", one after the other; empty: all agree
};

/// Whether any chunk of the state has a replica on another rank. The same on all ranks.
bool has_replicas(const Engine& engine);

/// Compares masters and what companions keep (the optimizer's state) between the ranks that hold the same chunk: these
/// are equal to the bit after any number of steps, unless hardware has changed one of them. Reads all of it once; 8
/// bytes a flat buffer and replica travel. What is compared is XXH3 of 64 bits, so of two different states one in 2^64
/// goes unseen. Between steps, from the training thread; collective over the job.
ReplicaReport compare_replicas(Engine& engine);

}  // namespace tesserae::shard
