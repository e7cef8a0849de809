#include "tesserae/offload/shelf.h"

#include "tesserae/offload/disk_shelf.h"
#include "tesserae/offload/pinned_shelf.h"

namespace tesserae::offload {

std::shared_ptr<Shelf> make_shelf(c10::Device device, const os::Path& folder) {
  return device.is_cpu() ? make_disk_shelf(folder) : make_pinned_shelf(device);
}

}  // namespace tesserae::offload
