#pragma once

#include <memory>

#include "tesserae/offload/shelf.h"

namespace tesserae::offload {

/// A shelf of paged tensors (paged_tensor.h). In memory is what is being read or written: the bytes that the units
/// within the horizon need together, and a constant for what is on its way out; put() waits for room.
std::shared_ptr<Shelf> make_disk_shelf(const os::Path& folder);

}  // namespace tesserae::offload
