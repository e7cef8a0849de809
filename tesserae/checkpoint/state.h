#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tesserae/checkpoint/dtype.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/mesh/mesh.h"
#include "tesserae/mesh/split.h"
#include "tesserae/mesh/transfer.h"

namespace tesserae::checkpoint {

/// The part of one tensor of the training state that this rank holds: what is saved, or what is to be filled. Names are
/// paths: "model/NAME" for parameters, "buffer/NAME" for buffers, "optimizer/STATE/NAME" for the optimizer's state of a
/// parameter, "random/RANK/DEVICE" for random numbers; anything else is the caller's.
struct Piece {
  std::string name;
  std::vector<int64_t> shape;  ///< of the whole tensor
  mesh::Splits split = {};     ///< which part of the whole tensor `elements` is about
  mesh::Range elements;        ///< of the flattened part; padding is neither written nor filled
  at::Tensor data;             ///< contiguous, elements.size() elements; the live memory, on any device
  /// This rank writes it. Of several ranks that hold the same elements, one does.
  bool written = true;
  /// Forward and backward may change it: an asynchronous save copies it before it returns.
  bool changes_in_forward = false;
  /// The checkpoint need not have it: loading then leaves it as it is.
  bool optional = false;
};

/// A tensor that every rank holds whole: rank 0 writes it.
Piece replicated(std::string name, const at::Tensor& tensor, int rank);

/// Its elements in the stored order of the whole tensor (docs/format.md), without padding.
mesh::Range stored_elements(const Piece& piece);

/// What a save takes, on one rank.
struct State {
  int64_t step = 0;
  mesh::Layout layout{1, {}};   ///< of the ranks that shard state
  mesh::AxisDegrees axes = {};  ///< of the job's mesh: `axes.tensor` times layout.ranks() take part
  std::vector<Piece> pieces;
  nlohmann::json training = nlohmann::json::object();  ///< rank 0's is kept
};

/// Throws InvalidArgument for a type that files have no name for (quantized and packed ones).
Dtype dtype_of(c10::ScalarType type);
/// Throws InvalidArgument for a type that torch has no name for.
c10::ScalarType scalar_type_of(Dtype dtype);

}  // namespace tesserae::checkpoint
