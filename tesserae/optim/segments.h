#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tesserae/shard/shard.h"

namespace tesserae::optim {

/// Says whether weight decay applies to a parameter, from its name and its whole shape.
using DecayPolicy = std::function<bool(const std::string& name, const std::vector<int64_t>& shape)>;

/// The usual policy: matrices and embeddings decay; norms and biases (fewer than two dimensions) do not.
bool decays_if_matrix(const std::string& name, const std::vector<int64_t>& shape);

/// A run of elements of a shard that are updated with the same options.
struct Segment {
  int64_t begin = 0;
  int64_t end = 0;
  bool decay = false;

  bool operator==(const Segment&) const = default;
};

/// Cuts a shard into as few segments as the policy allows: neighbours of the same kind are joined, padding between them
/// included, so that an optimizer makes few calls on long runs. Every slice lies in exactly one segment.
std::vector<Segment> segments(const shard::Shard& shard, const DecayPolicy& decays);

}  // namespace tesserae::optim
