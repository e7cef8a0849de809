#pragma once

#include <string>
#include <vector>

#include "tesserae/mesh/strategy.h"
#include "tesserae/shard/options.h"

namespace tesserae::testing {

/// One way to train, to be compared with one process on the same global batches. Every case trains twice, with SGD and
/// with AdamW. Of AdamW, which amplifies the order of summation in single elements, parameters are compared as wholes.
struct ParityCase {
  mesh::Strategy strategy;
  bool bf16 = false;
  int accumulation = 0;  ///< 0: one backward a step; 1: two, Accumulation::local; 2: two, Accumulation::two_hop
  bool clip = false;
  bool checkpoint = false;
  bool rows = false;  ///< CutBy::rows
};

std::string to_string(const ParityCase& parity_case);

/// Every valid triple and lifetime of `ranks` ranks, in fp32 and in bf16.  The other choices follow so that every pair
/// of values of two choices occurs in some case.
std::vector<ParityCase> pairwise_cases(int ranks);

/// The full product.
std::vector<ParityCase> all_cases(int ranks);

}  // namespace tesserae::testing
