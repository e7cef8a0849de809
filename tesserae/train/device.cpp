#include "tesserae/train/device.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sstream>

#include "tesserae/config/json.h"
#include "tesserae/os/files.h"

namespace tesserae::train {
namespace {

int cuda_devices() {
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return 0;
  return c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
}

}  // namespace

c10::Device choose_device(const std::string& wanted, int local_rank) {
  const int devices = wanted == "cpu" ? 0 : cuda_devices();
  if (wanted == "cpu" || (wanted == "auto" && devices == 0)) return c10::kCPU;
  if (local_rank >= devices) {
    throw config::ConfigError(
        "run.device", cat("local rank ", local_rank, " has no GPU: this host has ", devices, " that libtorch can use"));
  }
  at::globalContext().lazyInitDevice(c10::kCUDA);  // the allocator cannot be asked for memory before
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank)};
}

bool has_bf16(c10::Device device) {
  if (!device.is_cpu()) return true;
  try {
    // The kernel's names: x86's flags, and bf16 for ARM. torch's own query differs between its versions.
    std::istringstream words(os::files().read("/proc/cpuinfo"));
    for (std::string word; words >> word;) {
      if (word == "avx512_bf16" || word == "amx_bf16" || word == "bf16") return true;
    }
  } catch (const IoError&) {
    // Not Linux: fp32 is right everywhere.
  }
  return false;
}

}  // namespace tesserae::train
