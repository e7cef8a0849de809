#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "tesserae/comm/fabric.h"

namespace tesserae::sim {

/// comm::run_local on simulated accelerators: `body` as `ranks` threads of this process, rank r on device r, with lanes
/// that are streams and groups of NCCL's rules (process_group.h). Waits for each device at the end; rethrows the first
/// exception by rank. `devices`, if not 0: rank r is on device r modulo so many, on a stream of its own; ranks that
/// share one cannot run backwards, for which torch has one thread a device.
///
/// No liveness channel: peers of a rank that threw meet `deadline`.
void run_on_devices(int ranks, const std::function<void(comm::Fabric&)>& body,
                    std::chrono::milliseconds deadline = std::chrono::seconds(20), int devices = 0);

}  // namespace tesserae::sim
