#include "tesserae/checkpoint/dtype.h"

#include <array>

#include "tesserae/base/error.h"

namespace tesserae::checkpoint {
namespace {

struct Entry {
  Dtype dtype;
  std::string_view name;
  int bits;
};

constexpr std::array<Entry, 22> entries{{
    {Dtype::BOOL, "BOOL", 8},
    {Dtype::F4, "F4", 4},
    {Dtype::F6_E2M3, "F6_E2M3", 6},
    {Dtype::F6_E3M2, "F6_E3M2", 6},
    {Dtype::U8, "U8", 8},
    {Dtype::I8, "I8", 8},
    {Dtype::F8_E5M2, "F8_E5M2", 8},
    {Dtype::F8_E4M3, "F8_E4M3", 8},
    {Dtype::F8_E8M0, "F8_E8M0", 8},
    {Dtype::F8_E4M3FNUZ, "F8_E4M3FNUZ", 8},
    {Dtype::F8_E5M2FNUZ, "F8_E5M2FNUZ", 8},
    {Dtype::I16, "I16", 16},
    {Dtype::U16, "U16", 16},
    {Dtype::F16, "F16", 16},
    {Dtype::BF16, "BF16", 16},
    {Dtype::I32, "I32", 32},
    {Dtype::U32, "U32", 32},
    {Dtype::F32, "F32", 32},
    {Dtype::C64, "C64", 64},
    {Dtype::F64, "F64", 64},
    {Dtype::I64, "I64", 64},
    {Dtype::U64, "U64", 64},
}};

const Entry& entry(Dtype dtype) {
  return entries[static_cast<size_t>(dtype)];
}

constexpr bool in_order() {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (static_cast<size_t>(entries[i].dtype) != i) return false;
  }
  return true;
}
static_assert(in_order());

}  // namespace

std::string_view to_string(Dtype dtype) {
  return entry(dtype).name;
}

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const Entry& candidate : entries) {
    if (candidate.name == name) return candidate.dtype;
  }
  return std::nullopt;
}

int bits(Dtype dtype) {
  return entry(dtype).bits;
}

int64_t element_bytes(Dtype dtype) {
  if (bits(dtype) % 8 != 0) {
    throw InvalidArgument("element_bytes", cat(to_string(dtype), " packs ", bits(dtype), " bits an element"));
  }
  return bits(dtype) / 8;
}

}  // namespace tesserae::checkpoint
