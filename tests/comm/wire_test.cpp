#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tesserae/base/error.h"
#include "tesserae/comm/wire.h"

namespace tesserae::comm {
namespace {

constexpr int64_t block = 256;

at::Tensor there_and_back(const at::Tensor& data, Wire wire) {
  const at::Tensor packed = pack(data, wire);
  EXPECT_EQ(static_cast<int64_t>(packed.nbytes()), packed_bytes(data.numel(), data.element_size(), wire));
  at::Tensor result = at::empty_like(data);
  unpack(packed, wire, result);
  return result;
}

TEST(Wire, AnElementIsOffByTheDocumentedShareOfTheLargestInItsBlock) {
  for (const auto& [wire, share] : {std::pair(Wire::int8, 1.0 / 254), std::pair(Wire::int4, 1.0 / 14)}) {
    for (const int64_t elements : {int64_t{1}, block - 1, block, 5 * block + 17}) {
      // Blocks of very different size: each has a scale of its own.
      at::Tensor data = at::randn({elements});
      for (int64_t at = 0; at < elements; at += block) {
        data.narrow(0, at, std::min(block, elements - at)).mul_(std::exp2(static_cast<double>(at / block) * 10 - 20));
      }
      const at::Tensor result = there_and_back(data, wire);
      for (int64_t at = 0; at < elements; at += block) {
        const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, at, std::min(block, elements - at)); };
        const double largest = part(data).abs().max().item<double>();
        const double off = (part(result) - part(data)).abs().max().item<double>();
        EXPECT_LE(off, share * largest * 1.001) << wire << " x " << elements << " at " << at;
        EXPECT_GT(off + (elements == 1 ? 1 : 0), 0) << wire << ": something was rounded";
      }
    }
  }
}

TEST(Wire, TakesAQuarterOrAnEighthOfTheBytes) {
  EXPECT_EQ(packed_bytes(100 * block, 4, Wire::exact), 100 * block * 4);
  EXPECT_EQ(packed_bytes(100 * block, 4, Wire::int8), 100 * (block + 4));
  EXPECT_EQ(packed_bytes(100 * block, 4, Wire::int4), 100 * (block / 2 + 4));
}

TEST(Wire, OtherDtypesComeBackInTheirs) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    const at::Tensor data = at::randn({300}).to(dtype);
    const at::Tensor result = there_and_back(data, Wire::int8);
    EXPECT_EQ(result.scalar_type(), dtype);
    EXPECT_LE((result - data).abs().max().item<double>(), 0.03) << dtype;
  }
}

TEST(Wire, ZerosStayZeroAndWhatOverflowedStaysSo) {
  for (const Wire wire : {Wire::int8, Wire::int4}) {
    EXPECT_TRUE(there_and_back(at::zeros({700}), wire).eq(0).all().item<bool>()) << wire;
    for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
      at::Tensor data = at::randn({2 * block});
      data[3].fill_(bad);
      const at::Tensor result = there_and_back(data, wire);
      EXPECT_FALSE(result.narrow(0, 0, block).isfinite().all().item<bool>()) << wire << ": a scaler must see it";
      EXPECT_TRUE(result.narrow(0, block, block).isfinite().all().item<bool>()) << wire;
    }
  }
}

TEST(Wire, TheSmallestNumbersDoNotRunIntoTheirNeighbours) {
  for (const Wire wire : {Wire::int8, Wire::int4}) {
    const at::Tensor data = at::full({block}, 3e-45);
    EXPECT_LE((there_and_back(data, wire) - data).abs().max().item<double>(), 3e-44) << wire;
  }
}

TEST(Wire, WhatWasSentIsSentAgainUnchanged) {
  const at::Tensor once = there_and_back(at::randn({1000}), Wire::int8);
  EXPECT_LE((there_and_back(once, Wire::int8) - once).abs().max().item<double>(), 1e-6);
}

TEST(Wire, HasNames) {
  for (const Wire wire : {Wire::exact, Wire::int8, Wire::int4}) EXPECT_EQ(wire_of(cat(wire)), wire);
  EXPECT_THROW(wire_of("int2"), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::comm
