#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <string>

namespace tesserae::comm {

/// Whom this process serves a store to.
enum class Serve { nobody, this_host, network };

/// A connection to the store at that address; it waits for no other process. `serve`: whom, if anybody, this process
/// serves it to. `patience`: for the connection, and for keys until setTimeout() says otherwise. Throws what c10d
/// throws, and what os::TcpListener throws where it is served to this host.
c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& address, uint16_t port,
                                              std::chrono::milliseconds patience, Serve serve = Serve::nobody);

}  // namespace tesserae::comm
