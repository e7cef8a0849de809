#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tesserae::os {

/// Sleeps until somebody calls wake_all() on the word, at most so long; returns at once if it is not `seen`. May return
/// early. The word may lie in memory that processes share.
void wait_on(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds at_most);

/// Wakes all that sleep on the word, in whatever process.
void wake_all(const std::atomic<uint32_t>& word);

}  // namespace tesserae::os
