#include "tesserae/comm/open_store.h"

namespace tesserae::comm {

c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& address, uint16_t port,
                                              std::chrono::milliseconds patience, bool serves) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = serves;
  options.waitWorkers = false;
  options.timeout = patience;
  return c10::make_intrusive<c10d::TCPStore>(address, options);
}

}  // namespace tesserae::comm
