#include "tesserae/optim/segments.h"

namespace tesserae::optim {

bool decays_if_matrix(const std::string&, const std::vector<int64_t>& shape) {
  return shape.size() >= 2;
}

std::vector<Segment> segments(const shard::Shard& shard, const DecayPolicy& decays) {
  std::vector<Segment> out;
  for (const auto& slice : shard.slices) {
    if (slice.begin == slice.end) continue;
    const bool decay = decays(slice.name, slice.split.whole() ? slice.shape : slice.whole);
    if (!out.empty() && out.back().decay == decay) {
      out.back().end = slice.end;
    } else {
      out.push_back({slice.begin, slice.end, decay});
    }
  }
  return out;
}

}  // namespace tesserae::optim
