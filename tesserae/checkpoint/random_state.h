#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tesserae/checkpoint/state.h"

namespace tesserae::checkpoint {

class Checkpoint;

/// The state of torch's default generators of this rank, as copies: of the CPU and, if it is another one, of `device`.
std::vector<Piece> random_pieces(int rank, c10::Device device);

/// Sets the generators to what the same rank saved. False, and nothing is changed, if the checkpoint has none for this
/// rank and device: there were fewer ranks, or another kind of device. The caller then seeds anew.
bool load_random(const Checkpoint& checkpoint, int rank, c10::Device device);

}  // namespace tesserae::checkpoint
