#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/sim/counters.h"
#include "tests/sim/device.h"

namespace tesserae::sim {

inline at::TensorOptions on_device(c10::DeviceIndex index = 0, at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions().device(device(index)).dtype(dtype);
}

inline c10::impl::VirtualGuardImpl backend() {
  return c10::impl::VirtualGuardImpl(c10::kPrivateUse1);
}

inline c10::Stream side_stream(c10::DeviceIndex index = 0, bool high_priority = false) {
  return backend().getStreamFromGlobalPool(device(index), high_priority);
}

inline c10::Stream current(c10::DeviceIndex index = 0) {
  return backend().getStream(device(index));
}

/// Makes `later` wait for what is on `earlier`.
inline void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(c10::kPrivateUse1);
  event.record(earlier);
  event.block(later);
}

/// What the third call of `step` takes of the device: what is made once is made by then.
inline Counters spent_by_third(c10::DeviceIndex index, const std::function<void()>& step) {
  step();
  step();
  const Counters before = counters(index);
  step();
  return counters(index) - before;
}

/// How many seeds tests try, if not as many as they are used to (without_waits.cpp). 0: these.
inline int asked_seeds = 0;
inline uint64_t seeds_of(int usual) {
  return static_cast<uint64_t>(asked_seeds > 0 ? asked_seeds : usual);
}

/// Tests of the simulator: each begins with devices that are idle and well.
class Sim : public ::testing::Test {
 protected:
  static constexpr int seeds = 20;

  void SetUp() override {
    install();
    restart();
  }
  void TearDown() override { restart(); }

  /// For how many of the seeds `body` is right.
  static int right(const std::function<bool()>& body) {
    int count = 0;
    for (uint64_t seed = 0; seed < seeds; ++seed) {
      restart({.seed = seed});
      count += body() ? 1 : 0;
    }
    return count;
  }
};

}  // namespace tesserae::sim
