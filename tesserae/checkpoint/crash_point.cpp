#include "tesserae/checkpoint/crash_point.h"

#include <cstdlib>
#include <mutex>
#include <optional>

#include "tesserae/os/process.h"
#include "tesserae/os/signal_numbers.h"

namespace tesserae::checkpoint {

#ifndef TESSERAE_CRASH_POINTS

void crash_point(const char* /*name*/, int /*rank*/) {}

#else

namespace {

/// "NAME[@RANK][#COUNT]".
struct Order {
  std::string name;
  int rank = -1;
  std::atomic<int> passes_left = 1;
};

Order* order = nullptr;

void obey(std::string_view name, int rank) {
  if (name != order->name || (order->rank >= 0 && order->rank != rank)) return;
  if (--order->passes_left == 0) std::raise(os::signal_kill);
}

CrashHook hook_of_environment() {
  const char* value = std::getenv("TESSERAE_CRASH_AT");
  if (value == nullptr || *value == '\0') return nullptr;
  order = new Order;  // lives as long as the process
  order->name = value;
  if (const size_t count = order->name.find('#'); count != std::string::npos) {
    order->passes_left = std::atoi(order->name.c_str() + count + 1);
    order->name.resize(count);
  }
  if (const size_t rank = order->name.find('@'); rank != std::string::npos) {
    order->rank = std::atoi(order->name.c_str() + rank + 1);
    order->name.resize(rank);
  }
  return obey;
}

std::atomic<CrashHook>& hook() {
  static std::atomic<CrashHook> current = hook_of_environment();
  return current;
}

}  // namespace

void crash_point(const char* name, int rank) {
  if (const CrashHook call = hook().load(std::memory_order_relaxed)) call(name, rank);
}

const std::vector<std::string>& crash_point_names() {
  static const std::vector<std::string> names{"begin",
                                              "directory-made",
                                              "data-begun",
                                              "data-written",
                                              "data-synced",
                                              "part-written",
                                              "done",
                                              "all-done",
                                              "manifest-written",
                                              "marks-removed",
                                              "directory-synced",
                                              "renamed",
                                              "committed",
                                              "old-set-aside",
                                              "old-half-removed",
                                              "end"};
  return names;
}

void set_crash_hook(CrashHook call) {
  hook() = call;
}

#endif

}  // namespace tesserae::checkpoint
