#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <string>

namespace tesserae::comm {

/// A connection to the store at that address, which this process serves itself if `serves`; it waits for no other
/// process. `patience`: for the connection, and for keys until setTimeout() says otherwise. Throws what c10d throws.
c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& address, uint16_t port,
                                              std::chrono::milliseconds patience, bool serves = false);

}  // namespace tesserae::comm
