#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>

namespace tesserae::shard {

/// [bytes] on `device`, content undefined. Large blocks on the host lie in huge pages (os/pages.h).
c10::DataPtr allocate(int64_t bytes, c10::Device device);

/// A tensor of one dimension in such memory.
at::Tensor allocate(int64_t elements, c10::ScalarType dtype, c10::Device device);

/// [elements] in memory of the host that copies from and to `accelerator` reach beside the host (pinned). torch's
/// allocators of it round a request up to a power of two: pinned_bytes().
at::Tensor allocate_pinned(int64_t elements, c10::ScalarType dtype, c10::Device accelerator);
int64_t pinned_bytes(int64_t bytes);

/// Copies on the current stream. Between pinned memory and a device the host does not wait: until that has been done
/// it leaves the memory of the host alone.
void queue_copy(const at::Tensor& to, const at::Tensor& from);

}  // namespace tesserae::shard
