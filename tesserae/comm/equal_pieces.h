#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <cstdint>

namespace tesserae::comm {

/// Piece `index` of the elements of `buffer` as `pieces` equal ones; they divide it.
inline at::Tensor nth_piece(const at::Tensor& buffer, int index, int pieces) {
  const int64_t length = buffer.numel() / pieces;
  return buffer.view(-1).narrow(0, index * length, length);
}

/// Lets `body` work in place on the elements of `buffer` as `members` equal pieces, one after the other: on the buffer
/// itself or, where they do not divide it, on a copy with zeros behind, which is copied back.
template <class Body>
void in_equal_pieces(const at::Tensor& buffer, int members, const Body& body) {
  const at::Tensor flat = buffer.view(-1);
  const int64_t piece = (flat.numel() + members - 1) / members;
  if (flat.numel() == piece * members) return body(flat);
  const at::Tensor padded = at::zeros({piece * members}, flat.options());
  const at::Tensor used = padded.narrow(0, 0, flat.numel());
  used.copy_(flat);
  body(padded);
  flat.copy_(used);
}

}  // namespace tesserae::comm
