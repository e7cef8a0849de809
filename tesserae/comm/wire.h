#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>

namespace tesserae::comm {

/// How floating point numbers travel where bandwidth is scarce: as they are, or block-quantised (as in ZeRO++, Wang et
/// al., 2023, arXiv:2306.10209). 256 consecutive elements have one fp32 scale, the largest magnitude among them divided
/// by 127 (int8) or 7 (int4); each travels as the nearest multiple of it. So an element is off by at most 1/254 or 1/14
/// of the largest in its block. What is not finite stays so, with its block. A block of zeros stays zero.
enum class Wire : uint8_t { exact, int8, int4 };

std::ostream& operator<<(std::ostream& out, Wire wire);
/// The reverse. Throws InvalidArgument naming what there is.
Wire wire_of(const std::string& name);

/// `data` (contiguous, floating point) as bytes on the same device: scales, then codes. Wire::exact: `data` itself.
at::Tensor pack(const at::Tensor& data, Wire wire);
/// Fills `data` from what pack() made of as many elements.
void unpack(const at::Tensor& packed, Wire wire, const at::Tensor& data);
/// Bytes of pack()'s result; `element_size`: bytes of an element as it is.
int64_t packed_bytes(int64_t elements, size_t element_size, Wire wire);

}  // namespace tesserae::comm
