#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "tests/sim/room.h"

namespace tesserae::sim {

/// The room of a group whose members are processes, each with simulated devices of its own: what a task of one member's
/// stream brings to a collective travels to the others over Gloo, on that stream's thread. The rules are those of
/// members that are threads (process_group.h), but that a member learns when its task meets the others, not when it
/// enqueues, that they called something else.
///
/// `store`: of this group alone. `rank`: of this process among its `size` members.
std::shared_ptr<Room> room_of_processes(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int size);

}  // namespace tesserae::sim
