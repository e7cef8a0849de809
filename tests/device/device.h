#pragma once

#include <c10/core/Device.h>

#include <string>

namespace tesserae::testing {

/// The accelerator on which the tests of this folder run: that of TESSERAE_TEST_DEVICE, "sim" (the simulated one, if
/// nothing is said) or "cuda", and always its first, also for several ranks: they share it. Ready for use.
c10::Device test_device();

/// Keeps the current stream of `device` busy for a while, so that what is queued behind it comes late.
void keep_busy(c10::Device device);

}  // namespace tesserae::testing
