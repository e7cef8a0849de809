#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tesserae::shard {

/// XXH3 of 64 bits of the elements [begin, end) of a flat tensor, on whichever device, in memory or on a disk: a block
/// at a time, which need not all fit into memory. Of different values one pair in 2^64 has the same.
uint64_t hash_of(const at::Tensor& flat, int64_t begin, int64_t end);

}  // namespace tesserae::shard
