#include "tesserae/comm/wire.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tesserae/base/error.h"

namespace tesserae::comm {
namespace {

constexpr int64_t block = 256;  // elements with one scale
constexpr int64_t scale_bytes = sizeof(float);

int64_t blocks_of(int64_t elements) {
  return (elements + block - 1) / block;
}

double largest_code(Wire wire) {
  return wire == Wire::int8 ? 127 : 7;
}

// [blocks, block] fp32, zeros behind the last element.
at::Tensor in_blocks(const at::Tensor& data) {
  const int64_t elements = data.numel(), blocks = blocks_of(elements);
  const auto options = data.options().dtype(at::kFloat);
  const bool full = elements == blocks * block;
  at::Tensor rows = full ? at::empty({blocks * block}, options) : at::zeros({blocks * block}, options);
  rows.narrow(0, 0, elements).copy_(data.view(-1));
  return rows.view({blocks, block});
}

}  // namespace

std::ostream& operator<<(std::ostream& out, Wire wire) {
  return out << (wire == Wire::exact ? "exact" : wire == Wire::int8 ? "int8" : "int4");
}

Wire wire_of(const std::string& name) {
  for (const Wire wire : {Wire::exact, Wire::int8, Wire::int4}) {
    if (cat(wire) == name) return wire;
  }
  throw InvalidArgument("wire_of", cat("\"", name, "\": there are exact, int8 and int4"));
}

int64_t packed_bytes(int64_t elements, size_t element_size, Wire wire) {
  if (wire == Wire::exact) return elements * static_cast<int64_t>(element_size);
  const int64_t blocks = blocks_of(elements);
  return blocks * (scale_bytes + (wire == Wire::int8 ? block : block / 2));
}

at::Tensor pack(const at::Tensor& data, Wire wire) {
  if (wire == Wire::exact) return data;
  at::Tensor rows = in_blocks(data);
  const at::Tensor scales = rows.abs().amax(1, /*keepdim=*/true).div_(largest_code(wire));
  // 0 / 0 in a block of zeros; what is not finite lives on in its scale. Clamped: a denormal scale is not precise.
  const double most = largest_code(wire);
  rows.div_(scales).round_().nan_to_num_(0, 0, 0).clamp_(-most, most);
  at::Tensor codes;
  if (wire == Wire::int8) {
    codes = rows.to(at::kChar).view(at::kByte);
  } else {
    const at::Tensor pairs = rows.add_(8).to(at::kByte).view({-1, 2});
    codes = pairs.select(1, 0).add(pairs.select(1, 1), 16);
  }
  return at::cat({scales.view(-1).view(at::kByte), codes.view(-1)});
}

void unpack(const at::Tensor& packed, Wire wire, const at::Tensor& data) {
  if (wire == Wire::exact) {
    if (packed.data_ptr() != data.data_ptr()) data.view(-1).copy_(packed.view(-1));
    return;
  }
  const int64_t blocks = blocks_of(data.numel());
  const at::Tensor scales = packed.narrow(0, 0, blocks * scale_bytes).view(at::kFloat).view({blocks, 1});
  const at::Tensor codes = packed.narrow(0, blocks * scale_bytes, packed.numel() - blocks * scale_bytes);
  at::Tensor rows;
  if (wire == Wire::int8) {
    rows = codes.view(at::kChar).to(at::kFloat);
  } else {
    rows = at::empty({codes.numel(), 2}, codes.options().dtype(at::kFloat));
    rows.select(1, 0).copy_(codes.bitwise_and(15));
    rows.select(1, 1).copy_(codes.bitwise_right_shift(4));
    rows.sub_(8);
  }
  rows = rows.view({blocks, block}).mul_(scales);
  data.view(-1).copy_(rows.view(-1).narrow(0, 0, data.numel()));
}

}  // namespace tesserae::comm
