#pragma once

#include <cstddef>

namespace tesserae::os {

/// Addresses without memory behind them, which nobody can access until open_pages(). They begin on a huge page. Throws
/// IoError.
void* reserve_pages(size_t bytes);
void unreserve_pages(void* memory, size_t bytes) noexcept;

/// Part of such: zeroed memory, in huge pages where there are any, from its first access on.
void open_pages(void* memory, size_t bytes);
/// Its memory goes back to the system, and nobody can access it.
void close_pages(void* memory, size_t bytes) noexcept;

}  // namespace tesserae::os
