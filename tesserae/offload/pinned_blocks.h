#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tesserae::offload {

/// Pinned memory of the host, of any size. torch's allocators of it round every request up to a power of two, which is
/// twice the memory at worst: so this is blocks whose sizes are powers of two, the largest first.
class PinnedBlocks {
 public:
  PinnedBlocks() = default;
  /// For the accelerator of the current device. Throws c10::OutOfMemoryError.
  explicit PinnedBlocks(int64_t bytes);

  int64_t bytes() const { return bytes_; }
  /// Calls visit(offset from `begin`, bytes) for run after run of [begin, begin + count); a run lies in one block.
  void visit(int64_t begin, int64_t count, const std::function<void(int64_t, const at::Tensor&)>& visit) const;

 private:
  int64_t bytes_ = 0;
  std::vector<at::Tensor> blocks_;
};

}  // namespace tesserae::offload
