#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "tests/sim/device.h"
#include "tests/sim/operation.h"

namespace tesserae::sim {
namespace {

struct sigaction handler_before;

void on_fault(int signal, siginfo_t* info, void* /*context*/) {
  for (c10::DeviceIndex index = 0; index < device_count; ++index) {
    const Device* const device = Device::find(index);
    if (!device || !device->memory().holds(info->si_addr)) continue;
    const bool within = *Operation::current() != '\0';
    const char* const operation = within ? Operation::current() : Operation::last();
    char place[400], text[800];
    device->memory().describe(info->si_addr, place, sizeof(place));
    const int length =
        std::snprintf(text, sizeof(text),
                      "[sim] the host touched memory of device %d, %s %s: %s; copy to the host first (Tensor::cpu), or "
                      "let an operator do it on the device\n",
                      static_cast<int>(index), within ? "in" : "after", *operation ? operation : "nothing", place);
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text, static_cast<size_t>(length));
  }
  // Whoever was there before sees the same access again, when this returns.
  sigaction(signal, &handler_before, nullptr);
}

}  // namespace

void report_faults() {
  struct sigaction handler = {};
  handler.sa_sigaction = &on_fault;
  handler.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&handler.sa_mask);
  sigaction(SIGSEGV, &handler, &handler_before);
}

}  // namespace tesserae::sim
