#pragma once

#include <string>
#include <vector>

#include "tesserae/context/parallel.h"
#include "tesserae/mesh/strategy.h"

namespace tesserae::testing {

/// One way to train with tensor and context parallelism.
struct Case {
  int tensor_degree = 1;
  int context_degree = 1;
  context::Method method = context::Method::automatic;
  bool packed = false;  // documents end within sequences
  int64_t window = 0;
  mesh::Strategy strategy = {};
  bool sequence = false;
  bool bf16 = false;
  int accumulation = 0;  // 0: one backward a step; 1: two, Accumulation::local; 2: two, Accumulation::two_hop
  bool clip = false;
  bool checkpoint = false;
  bool tied = true;
  bool frozen = false;
  bool turned = false;  // half-way, the dial is turned to P = G = O = N
  bool adamw = false;   // parameters are compared as wholes: it amplifies the order of summation in single elements
};

std::string to_string(const Case& c);

/// Every (T, C, P, G, O), with T > 1 with and without sequence parallelism; methods, packed documents and windows take
/// turns. The other choices follow so that every pair of values of two choices occurs, and then anew in fp32, where all
/// numbers are compared closely.
std::vector<Case> cases(int ranks);

}  // namespace tesserae::testing
