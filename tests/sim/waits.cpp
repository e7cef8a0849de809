#include "tests/sim/waits.h"

#include <execinfo.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>
#include <utility>

// Where this program's own instructions lie; the linker says.
extern "C" const char __executable_start, etext;

namespace tesserae::sim {
namespace {

enum class Mode { nothing, watches, leaves_out };

// Written before other threads run.
Mode mode = Mode::nothing;
Wait omitted{};
std::vector<void*> omitted_through, omitted_at;

std::mutex mutex;
std::set<WaitCall> watched;

std::vector<void*> stack_here() {
  std::array<void*, 96> frames;
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  std::vector<void*> own;
  for (int i = 0; i < count; ++i) {
    const auto* const address = static_cast<const char*>(frames[static_cast<size_t>(i)]);
    if (address >= &__executable_start && address < &etext) own.push_back(frames[static_cast<size_t>(i)]);
  }
  return own;
}

bool contains(const std::vector<void*>& sorted, void* address) {
  return std::ranges::binary_search(sorted, address);
}

}  // namespace

const char* to_string(Wait wait) {
  constexpr const char* names[] = {"record", "block", "query", "synchronize", "work", "copy"};
  return names[static_cast<size_t>(wait)];
}

void watch_waits() {
  mode = Mode::watches;
}

std::vector<WaitCall> watched_waits() {
  const std::lock_guard lock(mutex);
  return {watched.begin(), watched.end()};
}

void leave_out(Wait wait, std::vector<void*> through, std::vector<void*> at) {
  omitted = wait;
  omitted_through = std::move(through);
  omitted_at = std::move(at);
  std::ranges::sort(omitted_through);
  std::ranges::sort(omitted_at);
  mode = Mode::leaves_out;
}

bool left_out(Wait wait) {
  if (mode == Mode::nothing) return false;
  if (mode == Mode::leaves_out && wait != omitted) return false;
  WaitCall call{wait, stack_here()};  // in both modes from here, so that all addresses are the same
  if (mode == Mode::watches) {
    const std::lock_guard lock(mutex);
    watched.insert(std::move(call));
    return false;
  }
  for (void* const address : call.stack) {
    if (contains(omitted_at, address)) return true;
    if (!contains(omitted_through, address)) return false;
  }
  return false;
}

}  // namespace tesserae::sim
