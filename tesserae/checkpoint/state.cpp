#include "tesserae/checkpoint/state.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::checkpoint {
namespace {

constexpr std::array<std::pair<c10::ScalarType, Dtype>, 19> pairs{{
    {at::kBool, Dtype::BOOL},
    {at::kByte, Dtype::U8},
    {at::kChar, Dtype::I8},
    {at::kFloat8_e5m2, Dtype::F8_E5M2},
    {at::kFloat8_e4m3fn, Dtype::F8_E4M3},
    {at::kFloat8_e8m0fnu, Dtype::F8_E8M0},
    {at::kFloat8_e4m3fnuz, Dtype::F8_E4M3FNUZ},
    {at::kFloat8_e5m2fnuz, Dtype::F8_E5M2FNUZ},
    {at::kShort, Dtype::I16},
    {at::kUInt16, Dtype::U16},
    {at::kHalf, Dtype::F16},
    {at::kBFloat16, Dtype::BF16},
    {at::kInt, Dtype::I32},
    {at::kUInt32, Dtype::U32},
    {at::kFloat, Dtype::F32},
    {at::kComplexFloat, Dtype::C64},
    {at::kDouble, Dtype::F64},
    {at::kLong, Dtype::I64},
    {at::kUInt64, Dtype::U64},
}};

}  // namespace

Piece replicated(std::string name, const at::Tensor& tensor, int rank) {
  return {.name = std::move(name),
          .shape = tensor.sizes().vec(),
          .elements = {0, tensor.numel()},
          .data = tensor,
          .written = rank == 0};
}

mesh::Range stored_elements(const Piece& piece) {
  // A part lies in the stored order as it lies in memory, without its padding, which comes last.
  const int64_t begin = mesh::part_begin(piece.shape, piece.split);
  const int64_t end = mesh::part_elements(piece.shape, piece.split);
  return {begin + std::min(piece.elements.begin, end), begin + std::min(piece.elements.end, end)};
}

Dtype dtype_of(c10::ScalarType type) {
  for (const auto& [ours, theirs] : pairs) {
    if (ours == type) return theirs;
  }
  throw InvalidArgument("dtype_of", cat("safetensors files have no type for ", c10::toString(type)));
}

c10::ScalarType scalar_type_of(Dtype dtype) {
  for (const auto& [ours, theirs] : pairs) {
    if (theirs == dtype) return ours;
  }
  throw InvalidArgument("scalar_type_of", cat("torch has no type for ", to_string(dtype)));
}

}  // namespace tesserae::checkpoint
