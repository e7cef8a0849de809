#include "tesserae/offload/pinned_blocks.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

namespace tesserae::offload {
namespace {

constexpr int64_t smallest = int64_t{64} << 10;  // so much may be lost

}  // namespace

PinnedBlocks::PinnedBlocks(int64_t bytes) : bytes_(bytes) {
  const auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  for (int64_t left = bytes; left > 0;) {
    const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(left)));
    blocks_.push_back(at::empty({std::min(left, std::max(power, smallest))}, pinned));
    left -= blocks_.back().numel();
  }
}

void PinnedBlocks::visit(int64_t begin, int64_t count,
                         const std::function<void(int64_t, const at::Tensor&)>& visit) const {
  int64_t start = 0;  // of the block
  for (const at::Tensor& block : blocks_) {
    const int64_t from = std::max(begin, start), to = std::min(begin + count, start + block.numel());
    if (from < to) visit(from - begin, block.narrow(0, from - start, to - from));
    start += block.numel();
  }
}

}  // namespace tesserae::offload
