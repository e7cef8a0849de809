#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>

namespace tesserae::shard {

/// [bytes] on `device`, content undefined. Large blocks on the host lie in huge pages (os/pages.h).
c10::DataPtr allocate(int64_t bytes, c10::Device device);

/// A tensor of one dimension in such memory.
at::Tensor allocate(int64_t elements, c10::ScalarType dtype, c10::Device device);

}  // namespace tesserae::shard
