#include "tesserae/base/error.h"
#include "tesserae/comm/transports/nccl.h"

namespace tesserae::comm {

bool has_nccl() {
  return false;
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>&, int, int, const NcclOptions&) {
  throw InvalidArgument("Fabric::connect",
                        "this build has no NCCL: it needs a torch with CUDA, and NCCL's and CUDA's headers, when CMake "
                        "configures; choose backend \"staged\", which carries a device's tensors through the host");
}

}  // namespace tesserae::comm
