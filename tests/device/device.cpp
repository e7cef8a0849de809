#include "tests/device/device.h"

#include <ATen/Context.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <cstdlib>

#include "tesserae/base/error.h"
#include "tests/sim/device.h"

namespace tesserae::testing {
namespace {

c10::Device find_device() {
  const char* const named = std::getenv("TESSERAE_TEST_DEVICE");
  const std::string name = named != nullptr ? named : "sim";
  if (name == "sim") {
    sim::install();
    return sim::device(0);
  }
  if (name == "cuda") {
    at::globalContext().lazyInitDevice(c10::kCUDA);
    return {c10::kCUDA, 0};
  }
  throw InvalidArgument("test_device", cat("TESSERAE_TEST_DEVICE is \"", name, "\"; set it to sim or cuda"));
}

}  // namespace

c10::Device test_device() {
  static const c10::Device device = find_device();
  return device;
}

void keep_busy(c10::Device device) {
  // The simulated device waits before each task by itself; on a GPU these are milliseconds.
  const bool simulated = device.type() == c10::kPrivateUse1;
  const int64_t size = simulated ? 8 : 4096;
  at::Tensor product = at::zeros({size, size}, at::TensorOptions().device(device));
  for (int i = 0; i < 8; ++i) product = at::matmul(product, product);
}

}  // namespace tesserae::testing
