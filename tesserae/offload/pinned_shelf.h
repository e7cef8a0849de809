#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "tesserae/offload/shelf.h"

namespace tesserae::offload {

/// A shelf of pinned memory of the host for storages of an accelerator. Copies run on two streams of their own, one in
/// each direction; the host never waits, and nothing depends on how fast they are:
///  1. put(): the copy waits for what the current stream has been given so far. The storage is kept meanwhile.
///  2. end_unit(), one unit later: the current stream waits for the copies of the unit before, and lets go of their
///  storages. So memory of the device is bounded by two units, whatever the host runs ahead.
///  3. load(): memory is taken on the current stream; the copy waits for that moment.
///  4. take(): the current stream waits for the copy.
std::shared_ptr<Shelf> make_pinned_shelf(c10::Device device);

}  // namespace tesserae::offload
