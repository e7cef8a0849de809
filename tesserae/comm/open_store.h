#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <string>

namespace tesserae::comm {

/// Whom this process serves a store to.
enum class Serve { nobody, this_host, network };

/// A connection to the store at that address, which this process serves itself if somebody is to be served; it waits
/// for no other process. `patience`: for the connection, and for keys until setTimeout() says otherwise. Throws what
/// c10d throws, and IoError where the port cannot be had.
c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& address, uint16_t port,
                                              std::chrono::milliseconds patience, Serve serve = Serve::nobody);

}  // namespace tesserae::comm
