#pragma once

namespace tesserae::offload {

/// From now on torch makes tensors on the host in blocks of malloc's own, aligned here. For programs and scripts, at
/// their begin: it is the process's. Does nothing where somebody has given torch another allocator, or
/// THP_MEM_ALLOC_ENABLE asks torch's for huge pages.
///
/// torch's allocator asks posix_memalign() for 64 bytes of alignment. In glibc before 2.38 that needs more room than a
/// block of the same size leaves when it is freed, so what a step frees does not serve the next one, and the heap grows
/// by up to a half of the activations (4 to 20 % of the four jobs that were measured). Blocks of before, and what else
/// of the process allocates, are not touched; torch's profiler sees what it saw.
void use_reusable_host_blocks();

}  // namespace tesserae::offload
