#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "tesserae/base/error.h"
#ifdef TESSERAE_HAS_SIM
#include "tests/sim/device.h"
#endif

namespace tesserae::bench {

/// What --device may be: sim is the simulated accelerator of the tests, on which times say nothing.
inline const std::vector<std::string> device_names = {"cpu", "cuda", "sim"};

/// The device of a rank, ready for use. Ranks over the backend "staged" share the first one, as does each rank that
/// sees one GPU only.
inline c10::Device device_of(const std::string& name, int local_rank, const std::string& backend = "auto") {
  if (name == "cpu") return c10::kCPU;
  const auto index = static_cast<c10::DeviceIndex>(backend == "staged" ? 0 : local_rank);
  if (name == "sim") {
#ifdef TESSERAE_HAS_SIM
    sim::install();
    return sim::device(index);
#else
    throw InvalidArgument("--device", "sim is in builds with tests only; configure with -DTESSERAE_TESTS=ON");
#endif
  }
  at::globalContext().lazyInitDevice(c10::kCUDA);  // the allocator cannot be asked for memory before
  return {c10::kCUDA, index};
}

}  // namespace tesserae::bench
