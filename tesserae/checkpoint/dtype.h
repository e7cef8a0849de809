#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tesserae::checkpoint {

/// The element types of safetensors files. All are little-endian; those narrower than a byte are packed.
enum class Dtype {
  BOOL,
  F4,
  F6_E2M3,
  F6_E3M2,
  U8,
  I8,
  F8_E5M2,
  F8_E4M3,
  F8_E8M0,
  F8_E4M3FNUZ,
  F8_E5M2FNUZ,
  I16,
  U16,
  F16,
  BF16,
  I32,
  U32,
  F32,
  C64,
  F64,
  I64,
  U64,
};

std::string_view to_string(Dtype dtype);                      ///< as in files: "F32"
std::optional<Dtype> dtype_from_name(std::string_view name);  ///< nothing for an unknown name
int bits(Dtype dtype);

/// Bytes of one element. Throws InvalidArgument for a type that is narrower than a byte: parts of a tensor of such a
/// type cannot be addressed.
int64_t element_bytes(Dtype dtype);

}  // namespace tesserae::checkpoint
