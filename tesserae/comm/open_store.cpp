#include "tesserae/comm/open_store.h"

#include "tesserae/os/tcp_listener.h"

namespace tesserae::comm {

c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& address, uint16_t port,
                                              std::chrono::milliseconds patience, Serve serve) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = serve != Serve::nobody;
  options.waitWorkers = false;
  options.timeout = patience;
  if (serve == Serve::this_host) {
    // Left to itself c10d listens at all addresses of the host: who reaches one of them could read and write the job's
    // store. And it looks up whose each connection to those is (::ffff:127.0.0.1 is not in /etc/hosts), and serves
    // nobody until the name server has answered, or 5 s have passed.
    os::TcpListener listener("127.0.0.1", port);
    options.port = listener.port();
    options.masterListenFd = listener.release();
  }
  return c10::make_intrusive<c10d::TCPStore>(address, options);
}

}  // namespace tesserae::comm
